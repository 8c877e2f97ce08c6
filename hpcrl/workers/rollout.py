"""The rollout role: prompts in, responses and their log-probs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.metrics import Metric, Sum, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.roles import ROLLOUT
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.prompts import PromptDataset
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.environments.turn_handler import turns_for_scorer
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, Trajectory
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import create_group
from hpcrl.workers.prompt_pictures import EncodedPictures, PromptPictures
from hpcrl.workers.response_columns import (
    ROLLOUT_BUSY_S,
    ROLLOUTS_REUSED,
    ROLLOUTS_STALE,
    WRITTEN,
    conversation_columns,
    recorded_responses,
    response_columns,
)
from hpcrl.workers.response_journal import ResponseJournal
from hpcrl.workers.response_stream import ResponseStream
from hpcrl.workers.scorer import ResponseScorer

if TYPE_CHECKING:
    from hpcrl.model.shape import ModelShape
    from hpcrl.workers.team import Team


class RolloutWorker(Worker):
    """Generates the responses to a batch (`generate`), generates responses without end (`submit`,
    `generate_until_interrupted`, `take_responses`), or reads recorded ones (`replay`).

    Args:
        scorer: scores finished responses, on leaders.
        agent: answers the model between turns.
        pictures: the pictures of prompts, for a vision-language model.
    """

    spec = ROLLOUT

    def __init__(
        self,
        layout: Layout,
        rank: int,
        engine: RolloutEngine,
        config: Config,
        prompts: dict[str, PromptDataset],
        shape: ModelShape,
        scorer: ResponseScorer | None = None,
        agent: AgentLoop | None = None,
        pictures: PromptPictures | None = None,
    ) -> None:
        super().__init__(layout, rank)
        self.engine = engine
        self.prompts = prompts
        self.softmax_size = shape.softmax_size
        self.routed_width = shape.routed.width if shape.routed is not None else 0  # of recorded experts of a token
        self.scorer, self.agent, self.pictures = scorer, agent, pictures
        self.on_response: Callable[[], None] | None = None  # called when a response of `generate` is finished
        self.config = config
        self.journal: ResponseJournal | None = None  # on leaders, if responses are kept for a restart
        self.recalled_version: int | None = None  # of the weights that drew the responses in the journal
        self.stream = ResponseStream(self)

    @classmethod
    def build(cls, team: Team, role: str) -> RolloutWorker | None:
        layout, world, config = team.layouts[role], team.world, team.config
        if world.rank not in layout:
            return None
        inputs, is_leader = team.inputs, world.rank in layout.leaders
        scorer = ResponseScorer.build(team) if inputs.is_scored and is_leader else None
        engine = engine_of(config).make(team.groups[role], inputs.shape, config, ranks_on_node=world.local_size)
        agent = _agent_loop(team, layout) if config.rollout.multi_turn.enable else None
        pictures = PromptPictures.build(team, engine, is_leader=is_leader)
        return cls(layout, world.rank, engine, config, inputs.prompts, inputs.shape, scorer, agent, pictures)

    @register(Dispatch.ONE_TO_ALL)
    def keep_responses(self, origin: str, recalled_version: int | None) -> None:
        """Write responses for training through to the run's generation logs from now on. Responses that an earlier
        attempt drew with weights of `recalled_version` are read from there. `origin` names the initial weights."""
        self.recalled_version = recalled_version
        if self.is_leader:
            folder = run_directory(self.config) / "rollouts"
            self.journal = ResponseJournal(folder, self.rank, self.config, origin)

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
        requests, shown = self._requests(batch), None
        if self.pictures is not None:
            shown = self.pictures.encode(batch.meta_info["split"], batch.samples["row"].tolist())
            requests = shown.added_to(requests)
        done, missing, metrics = self._recalled(batch, requests, sampling)
        drawn, counts = self._draw(batch.reorder(missing), [requests[index] for index in missing], sampling, shown)
        if not self.is_leader:
            return DataProto()
        done |= dict(zip(missing, drawn, strict=True))
        trajectories = [done[index] for index in range(len(requests))]
        columns = response_columns(requests, trajectories, self.routed_width * sampling.routed_experts)
        if self.agent is not None:
            columns = columns.union(conversation_columns(trajectories, self.config.rollout.multi_turn))
        if self.pictures is not None and shown is not None:
            options = {"has_tools": self.agent is not None, "archives": "weight_version" in batch.meta_info}
            columns = columns.union(self.pictures.drawn(shown, trajectories, **options))
        counts[ROLLOUT_BUSY_S] = Sum(time.perf_counter() - start)
        columns.meta_info["metrics"] = merge([metrics, *columns.metrics, counts])
        return columns

    @register(Dispatch.DP_ORDER, reads=("row",))
    def load_ahead(self, batch: DataProto) -> None:
        """Start to decode the pictures of rows that `generate` will be called with."""
        if self.pictures is not None:
            self.pictures.load_ahead(batch.meta_info["split"], batch.samples["row"].tolist())

    def _recalled(
        self, batch: DataProto, requests: list[Request], sampling: SamplingParams
    ) -> tuple[dict[int, Trajectory], list[int], dict[str, Metric]]:
        """Responses that an earlier attempt drew, by index of the request, on the leader; the indices of the other
        requests, on every rank of the replica; and metrics. Scoring of the responses begins."""
        version, known, counts = batch.meta_info.get("weight_version"), dict[int, Trajectory](), dict[str, int]()
        recall = version is not None and version == self.recalled_version
        if self.journal is not None and version is not None:
            self.journal.begin(sampling, step=batch.meta_info["step"], version=version, recall=recall)
            journaled = enumerate([self.journal.recall(request) for request in requests])
            known = {index: done for index, done in journaled if done is not None}
            counts = {ROLLOUTS_REUSED: len(known), ROLLOUTS_STALE: self.journal.num_stale}
        for index, done in known.items():
            self._begin_score(batch, index, done)
        skipped = set(self.context.broadcast(self.layout, list(known) if self.is_leader else None)) if recall else set()
        missing = [index for index in range(len(requests)) if index not in skipped]
        return known, missing, {name: Sum(float(count)) for name, count in counts.items() if count}

    def _draw(
        self, batch: DataProto, requests: list[Request], sampling: SamplingParams, shown: EncodedPictures | None
    ) -> tuple[list[Trajectory], dict[str, Metric]]:
        """New responses, in the order of the requests, and metrics of tools. Pictures of tools are added to `shown`."""
        meta, metrics = batch.meta_info, dict[str, Metric]()
        options: dict[str, Any] = {"seed": self.config.run.seed, "step": meta["step"], "on_step": self._on_step}
        options["on_finished"] = partial(self._finish, batch, requests)
        self.engine.wake()
        if self.agent is None:
            completions = self.engine.generate(requests, sampling, **options)
            trajectories = [Trajectory.from_completion(completion) for completion in completions]
        else:
            prompts, rows = self.prompts[meta["split"]], batch.samples["row"].tolist()
            records = [prompts.record(row) for row in rows] if self.is_leader else None
            encode = None if self.pictures is None or shown is None else partial(self.pictures.add_answers, shown)
            trajectories, metrics = self.agent.run(self.engine, requests, records, sampling, encode=encode, **options)
        if self.config.rollout.free_cache_engine:
            self.engine.sleep()
        return trajectories, metrics

    def _finish(self, batch: DataProto, requests: list[Request], index: int, done: Completion | Trajectory) -> None:
        """Called when a response of the batch is finished."""
        if self.on_response is not None:
            self.on_response()
        trajectory = done if isinstance(done, Trajectory) else Trajectory.from_completion(done)
        if self.journal is not None and "weight_version" in batch.meta_info:
            self.journal.write(requests[index], trajectory)
        self._begin_score(batch, index, trajectory)

    def _begin_score(self, batch: DataProto, index: int, done: Trajectory) -> None:
        if self.scorer is not None:
            turns = turns_for_scorer(done) if self.agent is not None else {}
            split, row = batch.meta_info["split"], int(batch.samples["row"][index])
            self.scorer.begin(split, row, done.token_ids, done.finish_reason, turns)

    @register(Dispatch.DP_ORDER, reads=("row", "epoch", "sample_index", "prompt"), leader_only=True, reentrant=True)
    def submit(self, batch: DataProto) -> None:
        """Add samples to the stream, all of each prompt; `prompt` is the number in the notifications to rank 0."""
        prompts, rows = batch.samples["prompt"].tolist(), batch.samples["row"].tolist()
        requests = self._requests(batch)
        if self.pictures is not None:
            requests = self.pictures.encode("train", rows, divided=False).added_to(requests)
        self.stream.add_responses(requests, prompts, rows)

    @register(Dispatch.ORDER_ALL)
    def generate_until_interrupted(self, sampling: SamplingParams, version: int) -> None:
        """Generate what was submitted, with weights of `version`, until a command arrives that is not reentrant.

        Rank 0 is notified by a `Finished` of prompts whose samples are drawn and scored. Responses that an earlier
        attempt drew with these weights are not drawn again.
        """
        self.engine.wake()
        self.stream.run(sampling, version)

    @register(
        Dispatch.DP_COMPUTE_PROTO, reads=("prompt", "sample_index"), writes=WRITTEN, leader_only=True, reentrant=True
    )
    def take_responses(self, batch: DataProto) -> DataProto:
        """The responses to finished prompts, with their weight versions; rows in order of prompts, a prompt's samples
        in order of their index."""
        return self.stream.pop_responses(dict.fromkeys(batch.samples["prompt"].tolist()))

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("position",),
        writes=(*WRITTEN, "token_level_scores?", "verdicts?"),
        leader_only=True,
    )
    def replay(self, batch: DataProto, folder: str, *, scores: bool = False) -> DataProto:
        """Recorded responses of meta_info["step"] instead of new ones; `position` is the row in the archive.

        Args:
            scores: whether to read their scores as well.
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


def _agent_loop(team: Team, rollout: Layout) -> AgentLoop:
    """Make the loop of agents. Collective over the ranks of each replica."""
    world, config = team.world, team.config
    replica = rollout.replica(rollout.coord(world.rank).dp)
    comm = create_group(world.comm, replica) if len(replica) > 1 else None
    log_path = run_directory(config) / "logs" / f"tools_{world.rank:05d}.log"
    options = config.rollout.multi_turn, config.data, team.inputs.tokenizer, comm, str(log_path)
    if config.async_training.mode == "bounded_staleness" and team.inputs.images is not None:
        raise InputError(
            "rollout.multi_turn.enable with a vision-language model does not go with "
            "async_training.mode=bounded_staleness; use one_step_off"
        )
    return AgentLoop(*options, team.inputs.images, config.rollout.max_num_seqs)
