"""Generation: prompts in, responses and their log-probs out; and the refit that brings the actor's weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from hpcrl.batch.data_proto import Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.controller.worker import Worker
from hpcrl.data.prompts import PromptDataset
from hpcrl.grid.groups import RoleGroups
from hpcrl.launch.exits import InputError
from hpcrl.model.shape import ModelShape
from hpcrl.roles.model_worker import DTYPES
from hpcrl.roles.scorer import ResponseScorer
from hpcrl.rollout.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.telemetry.archive import read_step, step_path


class RolloutWorker(Worker):
    """`scorer`, on home ranks, scores responses as they finish."""

    def __init__(
        self,
        groups: RoleGroups,
        shape: ModelShape,
        config: Config,
        prompts: dict[str, PromptDataset],
        scorer: ResponseScorer | None = None,
    ) -> None:
        super().__init__(groups.layout, groups.rank)
        self.prompts = prompts
        self.scorer = scorer
        self.seed = config.run.seed
        self.engine = NativeEngine(
            shape,
            tp_group=groups.tp if groups.layout.tp > 1 else None,
            tp_rank=groups.coord.tp,
            tp_size=groups.layout.tp,
            dtype=DTYPES[config.model.dtype],
            max_num_seqs=config.rollout.max_num_seqs,
            max_num_batched_tokens=config.rollout.max_num_batched_tokens,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        )

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("row", "epoch", "sample_index"),
        writes=("input_ids", "response_mask", "rollout_log_probs"),
    )
    def generate(self, batch: DataProto, sampling: SamplingParams) -> DataProto:
        """One response per row. meta_info: `split` names the dataset, `step` keys the random numbers."""
        prompts = self.prompts[batch.meta_info["split"]]
        columns = (batch.samples[name].tolist() for name in ("row", "epoch", "sample_index"))
        requests = [
            Request(prompts.prompt_ids(row), prompts.uid(row, epoch), sample)
            for row, epoch, sample in zip(*columns, strict=True)
        ]
        split, rows = batch.meta_info["split"], batch.samples["row"].tolist()

        def begin_score(index: int, done: Completion) -> None:
            if self.scorer is not None:
                self.scorer.begin(split, rows[index], done.token_ids, done.finish_reason)

        self.engine.wake()
        completions = self.engine.generate(
            requests,
            sampling,
            seed=self.seed,
            step=batch.meta_info["step"],
            on_finished=begin_score,
            on_step=self.scorer.pump if self.scorer is not None else None,
        )
        self.engine.sleep()
        return responses(requests, completions)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("position",),
        writes=("input_ids", "response_mask", "rollout_log_probs", "token_level_scores?"),
        homes_only=True,
    )
    def replay(self, batch: DataProto, folder: str, *, scores: bool = False) -> DataProto:
        """The recorded responses of meta_info["step"] in place of new ones; `position` is the row in the archive.

        With `scores` also what scoring gave them.
        """
        names = ["input_ids", "response_mask", "rollout_log_probs", *(["token_level_scores"] if scores else [])]
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
        kept = ["prompt_length", "response_length", "finish_reason"]
        if scores:
            samples["extras"] = np.array([json.loads(text) for text in samples["extras"]], object)
            kept += [name for name in ("score", "acc", "extras", "rm_score") if name in samples]
        return DataProto(columns, {name: samples[name][rows] for name in kept}, {})


def responses(requests: list[Request], completions: list[Completion]) -> DataProto:
    """Requests and completions as columns: sequences are prompt then response; one entry per response token."""
    prompt_length = np.array([len(request.prompt_ids) for request in requests], np.int32)
    response_length = np.array([len(completion.token_ids) for completion in completions], np.int32)
    ids = [
        part
        for request, done in zip(requests, completions, strict=True)
        for part in (request.prompt_ids, done.token_ids)
    ]
    log_probs = [completion.log_probs for completion in completions]
    of_response = torch.from_numpy(response_length)
    input_ids = torch.from_numpy(np.concatenate(ids).astype(np.int32)) if ids else torch.zeros(0, dtype=torch.int32)
    return DataProto(
        {
            "input_ids": Ragged.from_lengths(input_ids, torch.from_numpy(prompt_length + response_length)),
            "response_mask": Ragged.from_lengths(
                torch.ones(int(response_length.sum()), dtype=torch.int32), of_response
            ),
            "rollout_log_probs": Ragged.from_lengths(
                torch.from_numpy(np.concatenate(log_probs)) if log_probs else torch.zeros(0), of_response
            ),
        },
        {
            "prompt_length": prompt_length,
            "response_length": response_length,
            "finish_reason": np.array([completion.finish_reason for completion in completions], dtype=object),
        },
        {},
    )
