"""Generation: prompts in, responses and their log-probs out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hpcrl.algorithms.metrics import Metric, Sum
from hpcrl.batch.data_proto import Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.controller.worker import Worker
from hpcrl.data.prompts import PromptDataset
from hpcrl.grid.layout import Layout
from hpcrl.launch.exits import InputError
from hpcrl.roles.response_stream import Response, ResponseStream
from hpcrl.roles.responses import response_columns
from hpcrl.roles.scorer import ResponseScorer
from hpcrl.rollout.agent.loop import AgentLoop
from hpcrl.rollout.agent.statistics import turn_columns, turns_for_scorer
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, Trajectory
from hpcrl.telemetry.archive import read_step, step_path

WRITTEN = ("input_ids", "response_mask", "rollout_log_probs")


class RolloutWorker(Worker):
    """`scorer`, on home ranks, scores responses as they finish. `agent` answers the model between its turns."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        engine: RolloutEngine,
        config: Config,
        prompts: dict[str, PromptDataset],
        scorer: ResponseScorer | None = None,
        agent: AgentLoop | None = None,
    ) -> None:
        super().__init__(layout, rank)
        self.engine = engine
        self.prompts = prompts
        self.scorer = scorer
        self.agent = agent
        self.seed = config.run.seed
        self.free_cache = config.rollout.free_cache_engine
        self.on_response: Callable[[], None] | None = None  # told of each response of `generate`, as it ends
        self.stream = ResponseStream(
            self,
            scorer,
            "train",
            capacity=config.rollout.max_num_seqs,
            interrupts=config.async_training.partial_rollout,
        )

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Ends the processes of tools."""
        if self.agent is not None:
            self.agent.close()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row", "epoch", "sample_index"), writes=WRITTEN)
    def generate(self, batch: DataProto, sampling: SamplingParams) -> DataProto:
        """One response per row. meta_info: `split` names the dataset, `step` keys the random numbers."""
        split, rows, requests = batch.meta_info["split"], batch.samples["row"].tolist(), self._requests(batch)

        def begin_score(index: int, done: Completion | Trajectory) -> None:
            if self.on_response is not None:
                self.on_response()
            if self.scorer is not None:
                turns = turns_for_scorer(done) if isinstance(done, Trajectory) else {}
                self.scorer.begin(split, rows[index], done.token_ids, done.finish_reason, turns)

        start = time.perf_counter()
        self.engine.wake()
        options = {"seed": self.seed, "step": batch.meta_info["step"]}
        metrics: dict[str, Metric] = {}
        if self.agent is not None:
            records = [self.prompts[split].record(row) for row in rows] if self.is_home else None
            trajectories, metrics = self.agent.run(
                self.engine,
                requests,
                records,
                sampling,
                on_finished=begin_score,
                on_step=self._meanwhile,
                **options,
            )
        else:
            completions = self.engine.generate(
                requests, sampling, on_finished=begin_score, on_step=self._meanwhile, **options
            )
            trajectories = [Trajectory.of_one_turn(completion) for completion in completions]
        if self.free_cache:
            self.engine.sleep()
        found = response_columns(requests, trajectories)
        if self.agent is not None:
            found.samples |= turn_columns(trajectories)
        found.meta_info["metrics"] = {**metrics, "perf/rollout_busy_s": Sum(time.perf_counter() - start)}
        return found

    @register(Dispatch.DP_ORDER, reads=("row", "epoch", "sample_index", "prompt"), homes_only=True, meanwhile=True)
    def submit(self, batch: DataProto) -> None:
        """More samples for the stream, whole prompts; `prompt` is the number by which rank 0 will hear of them."""
        prompts, rows = batch.samples["prompt"].tolist(), batch.samples["row"].tolist()
        self.stream.add(
            [
                Response(request, prompt, row)
                for request, prompt, row in zip(self._requests(batch), prompts, rows, strict=True)
            ]
        )

    @register(Dispatch.ORDER_ALL)
    def go_on(self, sampling: SamplingParams, version: int) -> None:
        """Generates what was submitted, with weights of `version`, until a command comes that cannot run meanwhile.

        Rank 0 hears a `Finished` for each prompt whose samples and scores are there.
        """
        self.engine.wake()
        self.stream.run(self.engine, sampling, seed=self.seed, version=version)

    @register(
        Dispatch.DP_COMPUTE_PROTO, reads=("prompt", "sample_index"), writes=WRITTEN, homes_only=True, meanwhile=True
    )
    def take(self, batch: DataProto) -> DataProto:
        """The responses to prompts that have been told of, with their weight versions; rows in order of prompts, all
        of a prompt's samples in order of their index."""
        prompts = batch.samples["prompt"].tolist()
        responses = [response for prompt in dict.fromkeys(prompts) for response in self.stream.pop(prompt)]
        found = response_columns(
            [response.request for response in responses], [response.trajectory() for response in responses]
        )
        versions = np.array([response.versions for response in responses], np.int64).reshape(-1, 2)
        found.samples["weight_version_min"], found.samples["weight_version_max"] = versions.T
        return found

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("position",),
        writes=(*WRITTEN, "token_level_scores?"),
        homes_only=True,
    )
    def replay(self, batch: DataProto, folder: str, *, scores: bool = False) -> DataProto:
        """The recorded responses of meta_info["step"] in place of new ones; `position` is the row in the archive.

        With `scores` also what scoring gave them.
        """
        names = [*WRITTEN, *(["token_level_scores"] if scores else [])]
        tokens, samples, _ = read_step(step_path(Path(folder), batch.meta_info["step"]), names)
        rows = batch.samples["position"]
        for uid, row, epoch in zip(*(samples[name][rows].tolist() for name in ("uid", "row", "epoch")), strict=True):
            found = self.prompts["train"].uid(row, epoch) if row < len(self.prompts["train"]) else "no such row"
            if uid != found:
                raise InputError(
                    f"{folder}: recorded sample {uid} is {found} in data.train_files; "
                    "replay with the data files and the filter of the recording"
                )
        columns: Columns = {
            name: Ragged(torch.from_numpy(tokens[name][0]), torch.from_numpy(tokens[name][1])).take(rows)
            for name in names
        }
        turns = [name for name in ("num_turns", "tool_call_counts") if name in samples]
        kept = ["prompt_length", "response_length", "finish_reason", *turns]
        if scores:
            samples["extras"] = np.array([json.loads(text) for text in samples["extras"]], object)
            kept += [name for name in ("score", "acc", "extras", "rm_score") if name in samples]
        return DataProto(columns, {name: samples[name][rows] for name in kept}, {})

    def _requests(self, batch: DataProto) -> list[Request]:
        prompts = self.prompts[batch.meta_info["split"]]
        columns = (batch.samples[name].tolist() for name in ("row", "epoch", "sample_index"))
        return [
            Request(prompts.prompt_ids(row), prompts.uid(row, epoch), sample)
            for row, epoch, sample in zip(*columns, strict=True)
        ]

    def _meanwhile(self) -> None:
        """Between two tokens: scoring goes on, and others get the rows that this rank owes them."""
        self.tick()
        if self.scorer is not None:
            self.scorer.pump()
        if self.is_home:
            self.desk.attend()
