"""Generation: prompts in, responses and their log-probs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcrl.algorithms.metrics import Metric, Sum, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.plugins import parameters
from hpcrl.config.roles import ROLLOUT
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.prompts import PromptDataset
from hpcrl.observe.record.archive import PictureFolder
from hpcrl.rewards.manager import REWARD_MANAGERS
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.environments.turn_handler import turn_columns, turn_metrics, turns_for_scorer
from hpcrl.rollout.protocol import Completion, PictureEncoder, Request, RolloutEngine, SamplingParams, Trajectory
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import create_group
from hpcrl.workers.prompt_pictures import EncodedPictures, PromptPictures, keep_tool_pictures, tool_pictures_text
from hpcrl.workers.response_columns import WRITTEN, recorded_responses, response_columns
from hpcrl.workers.response_journal import ResponseJournal
from hpcrl.workers.response_stream import Response, ResponseStream
from hpcrl.workers.scorer import ResponseScorer

if TYPE_CHECKING:
    from hpcrl.workers.team import Team


class RolloutWorker(Worker):
    """Generates responses. scorer: scores finished responses, on leaders. agent: answers the model between turns.
    pictures: those of prompts, of a vision-language model."""

    spec = ROLLOUT

    def __init__(
        self,
        layout: Layout,
        rank: int,
        engine: RolloutEngine,
        config: Config,
        prompts: dict[str, PromptDataset],
        softmax_size: int,
        scorer: ResponseScorer | None = None,
        agent: AgentLoop | None = None,
        pictures: PromptPictures | None = None,
    ) -> None:
        super().__init__(layout, rank)
        self.engine = engine
        self.prompts = prompts
        self.softmax_size = softmax_size
        self.scorer = scorer
        self.agent = agent
        self.pictures = pictures
        self.on_response: Callable[[], None] | None = None  # called when a response of `generate` is finished
        self.config = config
        self.recalled_version: int | None = None  # of the weights that drew the responses in the journal
        self.picture_folder = PictureFolder(run_directory(config) / "rollouts")
        self.stream = ResponseStream(self, scorer, config)

    @classmethod
    def build(cls, team: Team, role: str) -> RolloutWorker | None:
        layout, world, config = team.layouts[role], team.world, team.config
        if world.rank not in layout:
            return None
        scorer = _response_scorer(team) if team.inputs.is_scored and world.rank in layout.leaders else None
        shape = team.inputs.shape
        engine = engine_of(config).make(team.groups[role], shape, config, ranks_on_node=world.local_size)
        agent = _agent_loop(team, layout) if config.rollout.multi_turn.enable else None
        pictures = None
        if shape.vision is not None:
            cache, images = int(config.model.vision.cache_gib * 2**30), team.inputs.images
            assert images is not None
            loaders, encoder = team.image_loaders(team.inputs.prompts), cast(PictureEncoder, engine)
            pictures = PromptPictures(encoder, shape, images, cache, loaders, is_leader=world.rank in layout.leaders)
        prompts = team.inputs.prompts
        return cls(layout, world.rank, engine, config, prompts, shape.softmax_size, scorer, agent, pictures)

    @register(Dispatch.ONE_TO_ALL)
    def keep_responses(self, origin: str, recalled_version: int | None) -> None:
        """Write responses for training through to the run's generation logs from now on. Responses that an earlier
        attempt drew with weights of `recalled_version` are read from there. `origin` names the initial weights."""
        self.recalled_version = recalled_version
        if self.is_leader:
            folder = run_directory(self.config) / "rollouts"
            self.stream.journal = ResponseJournal(folder, self.rank, self.config, origin)

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """End the processes of tools and of pictures."""
        if self.agent is not None:
            self.agent.close()
        if self.pictures is not None:
            self.pictures.close()

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row", "epoch", "sample_index"), writes=WRITTEN)
    def generate(self, batch: DataProto, sampling: SamplingParams) -> DataProto:
        """One response per row. meta_info: `split` names the dataset, `step` keys the random numbers, and with
        `weight_version`, that of the engine's weights, responses are kept (see `keep_responses`)."""
        start = time.perf_counter()
        split, rows = batch.meta_info["split"], batch.samples["row"].tolist()
        requests, shown, metrics = self._requests(batch), None, dict[str, Metric]()
        if self.pictures is not None:
            shown = self.pictures.encode(split, rows)
            requests = with_pictures(requests, shown)
        journal = self.stream.journal if "weight_version" in batch.meta_info else None
        known, left = self._recalled(requests, sampling, batch.meta_info)
        if known:
            metrics["perf/rollouts_reused"] = Sum(float(len(known)))
        if journal is not None and journal.num_stale:
            metrics["perf/rollouts_stale"] = Sum(float(journal.num_stale))

        def begin_score(index: int, done: Trajectory) -> None:
            if self.scorer is not None:
                turns = turns_for_scorer(done) if self.agent is not None else {}
                self.scorer.begin(split, rows[index], done.token_ids, done.finish_reason, turns)

        def finished(place: int, done: Completion | Trajectory) -> None:
            if self.on_response is not None:
                self.on_response()
            trajectory = done if isinstance(done, Trajectory) else Trajectory.from_completion(done)
            if journal is not None:
                journal.write(requests[left[place]], trajectory)
            begin_score(left[place], trajectory)

        for index, done in known.items():
            begin_score(index, done)
        own, their_rows = [requests[index] for index in left], [rows[index] for index in left]
        drawn, found = self._draw(own, their_rows, batch.meta_info, sampling, finished, shown)
        if not self.is_leader:
            return DataProto({}, {}, {})
        known |= dict(zip(left, drawn, strict=True))
        trajectories = [known[index] for index in range(len(requests))]
        columns = response_columns(requests, trajectories)
        if self.agent is not None:
            columns.samples |= turn_columns(trajectories)
            found = merge([found, turn_metrics(trajectories)])
        if shown is not None:
            metrics |= self._add_pictures(columns, shown, trajectories, batch.meta_info)
        columns.meta_info["metrics"] = {**metrics, **found, "perf/rollout_busy_s": Sum(time.perf_counter() - start)}
        return columns

    def _add_pictures(
        self, columns: DataProto, shown: EncodedPictures, trajectories: Sequence[Trajectory], meta: dict[str, Any]
    ) -> dict[str, Metric]:
        """Add the column of pictures, and of those that tools returned; return their counts. For leaders."""
        assert self.pictures is not None
        answers = [done.pictures for done in trajectories]
        returned = [picture for answer in answers for picture in answer]
        self.pictures.add_answers(shown, returned, divided=False)  # those of recalled responses
        columns.tokens["pictures"] = column = shown.column(answers)
        columns.samples |= self.pictures.work_of(column)
        if self.agent is not None:
            columns.samples["tool_pictures"] = np.array([tool_pictures_text(answer) for answer in answers], object)
            if "weight_version" in meta:  # training, whose samples are archived
                keep_tool_pictures(self.picture_folder, returned)
        counts = {"perf/pictures": float(len(shown.features)), "perf/pictures_encoded": float(shown.num_encoded)}
        if flops := self.pictures.flops(column):
            counts["perf/tower_flops"] = flops
        return {name: Sum(count) for name, count in counts.items()}

    @register(Dispatch.DP_ORDER, reads=("row",))
    def load_ahead(self, batch: DataProto) -> None:
        """Start to decode the pictures of rows that `generate` will be called with."""
        if self.pictures is not None:
            self.pictures.load_ahead(batch.meta_info["split"], batch.samples["row"].tolist())

    def _recalled(
        self, requests: list[Request], sampling: SamplingParams, meta: dict[str, Any]
    ) -> tuple[dict[int, Trajectory], list[int]]:
        """Responses that an earlier attempt drew, by index of the request, on the leader; and the indices of the other
        requests, on every rank of the replica."""
        known: dict[int, Trajectory] = {}
        version = meta.get("weight_version")
        recall = version is not None and version == self.recalled_version
        if self.stream.journal is not None and version is not None:
            self.stream.journal.begin(sampling, step=meta["step"], version=version, recall=recall)
            found = [self.stream.journal.recall(request) for request in requests]
            known = {index: done for index, done in enumerate(found) if done is not None}
        skipped = set(self.context.broadcast(self.layout, list(known) if self.is_leader else None)) if recall else set()
        return known, [index for index in range(len(requests)) if index not in skipped]

    def _draw(
        self,
        requests: list[Request],
        rows: list[int],
        meta: dict[str, Any],
        sampling: SamplingParams,
        on_finished: Callable[[int, Any], None],
        shown: EncodedPictures | None,
    ) -> tuple[list[Trajectory], dict[str, Metric]]:
        """New responses, in the order of the requests, and metrics of tools. Pictures of tools are added to `shown`."""
        self.engine.wake()
        seed = self.config.run.seed
        options = {"step": meta["step"], "on_finished": on_finished, "on_step": self._on_step}
        metrics: dict[str, Metric] = {}
        if self.agent is not None:
            records = [self.prompts[meta["split"]].record(row) for row in rows] if self.is_leader else None
            encode = None if self.pictures is None or shown is None else partial(self.pictures.add_answers, shown)
            trajectories, metrics = self.agent.run(
                self.engine, requests, records, sampling, seed=seed, encode=encode, **options
            )
        else:
            completions = self.engine.generate(requests, sampling, seed=seed, **options)
            trajectories = [Trajectory.from_completion(completion) for completion in completions]
        if self.config.rollout.free_cache_engine:
            self.engine.sleep()
        return trajectories, metrics

    @register(Dispatch.DP_ORDER, reads=("row", "epoch", "sample_index", "prompt"), leader_only=True, reentrant=True)
    def submit(self, batch: DataProto) -> None:
        """Add samples to the stream, all of each prompt; `prompt` is the number in the notifications to rank 0."""
        prompts, rows = batch.samples["prompt"].tolist(), batch.samples["row"].tolist()
        requests = self._requests(batch)
        if self.pictures is not None:
            requests = with_pictures(requests, self.pictures.encode("train", rows, divided=False))
        self.stream.add([Response(*sample) for sample in zip(requests, prompts, rows, strict=True)])

    @register(Dispatch.ORDER_ALL)
    def go_on(self, sampling: SamplingParams, version: int) -> None:
        """Generate what was submitted, with weights of `version`, until a command arrives that is not reentrant.

        Rank 0 is notified by a `Finished` of prompts whose samples are drawn and scored. Responses that an earlier
        attempt drew with these weights are not drawn again.
        """
        self.engine.wake()
        if self.stream.journal is not None:
            recall = version == self.recalled_version
            self.stream.journal.begin(sampling, step=version + 1, version=version, recall=recall)
        self.stream.run(self.engine, sampling, seed=self.config.run.seed, version=version)

    @register(
        Dispatch.DP_COMPUTE_PROTO, reads=("prompt", "sample_index"), writes=WRITTEN, leader_only=True, reentrant=True
    )
    def take(self, batch: DataProto) -> DataProto:
        """The responses to finished prompts, with their weight versions; rows in order of prompts, a prompt's samples
        in order of their index."""
        prompts = batch.samples["prompt"].tolist()
        responses = [response for prompt in dict.fromkeys(prompts) for response in self.stream.pop(prompt)]
        requests = [each.request for each in responses]
        found = response_columns(requests, [each.trajectory() for each in responses])
        if self.pictures is not None:
            found.tokens["pictures"] = EncodedPictures.of_requests(requests).column()
        versions = np.array([response.versions for response in responses], np.int64).reshape(-1, 2)
        found.samples["weight_version_min"], found.samples["weight_version_max"] = versions.T
        num_recalled = sum(response.is_recalled for response in responses)
        if num_recalled:
            found.meta_info["metrics"] = {"perf/rollouts_reused": Sum(float(num_recalled))}
        return found

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("position",),
        writes=(*WRITTEN, "token_level_scores?", "verdicts?"),
        leader_only=True,
    )
    def replay(self, batch: DataProto, folder: str, *, scores: bool = False) -> DataProto:
        """Recorded responses of meta_info["step"] instead of new ones; `position` is the row in the archive.

        `scores`: read their scores as well.
        """
        return recorded_responses(self, batch, folder, scores=scores)

    def _requests(self, batch: DataProto) -> list[Request]:
        prompts = self.prompts[batch.meta_info["split"]]
        columns = (batch.samples[name].tolist() for name in ("row", "epoch", "sample_index"))
        return [
            Request(prompts.prompt_ids(row), prompts.uid(row, epoch), sample)
            for row, epoch, sample in zip(*columns, strict=True)
        ]

    def _on_step(self) -> None:
        """Called between two tokens: advance scoring, and send other ranks the rows that they need."""
        self.tick()
        if self.scorer is not None:
            self.scorer.pump()
        if self.is_leader:
            self.context.poll()


def with_pictures(requests: list[Request], pictures: EncodedPictures) -> list[Request]:
    return [replace(request, pictures=mine) for request, mine in zip(requests, pictures.of_samples(), strict=True)]


def _agent_loop(team: Team, rollout: Layout) -> AgentLoop:
    """Make the loop of agents. Collective over the ranks of each replica."""
    world, config = team.world, team.config
    replica = rollout.replica(rollout.coord(world.rank).dp)
    comm = create_group(world.comm, replica) if len(replica) > 1 else None
    log_path = run_directory(config) / "logs" / f"tools_{world.rank:05d}.log"
    options = config.rollout.multi_turn, config.data, team.inputs.tokenizer, comm, str(log_path)
    return AgentLoop(*options, team.inputs.images)


def _response_scorer(team: Team) -> ResponseScorer:
    config, manager = team.config, None
    if config.reward.uses_rules:
        log_path = run_directory(config) / "logs" / f"scorer_{team.world.rank:05d}.log"
        chosen = REWARD_MANAGERS.get(config.reward.reward_manager.name)
        params = parameters(config, "reward", chosen.name)
        manager = chosen.function(config.reward, params, config.data.max_response_length, str(log_path))
    return ResponseScorer(manager, team.inputs.tokenizer, team.inputs.prompts)
