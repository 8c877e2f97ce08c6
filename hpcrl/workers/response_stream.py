"""Responses that are generated while training continues."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Metric, Sum, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.rollout.environments.conversation import Conversation
from hpcrl.rollout.environments.turn_handler import TurnHandler, TurnResult, turns_for_scorer
from hpcrl.rollout.protocol import Completion, Request, SamplingParams, Trajectory
from hpcrl.runtime.mpi import wait_for_ranks
from hpcrl.workers.prompt_pictures import EncodedPictures
from hpcrl.workers.response_columns import ROLLOUTS_REUSED, conversation_columns, response_columns

if TYPE_CHECKING:
    from hpcrl.workers.rollout import RolloutWorker


@dataclass(eq=False)
class Response:
    """One sample, running or finished. versions: of the weights that drew its first and its last token. number: its
    place among those that this replica has started. done: what it is in the end."""

    request: Request
    group: int  # rank 0's number of the prompt
    row: int
    versions: tuple[int, int] | None = None
    number: int = -1
    done: Trajectory | None = None
    is_recalled: bool = False  # drawn by an earlier attempt
    conversation: Conversation = field(init=False)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.request)

    def extend(self, more: Completion, version: int) -> None:
        self.conversation.add_turn(more)
        if len(more.token_ids):
            self.versions = (self.versions[0] if self.versions else version, version)

    def finish(self, done: Trajectory, version: int) -> None:
        """Record what the response is in the end.

        Args:
            version: version of the weights, used if it has no token of theirs because its environment failed.
        """
        self.done, self.versions = done, self.versions or (version, version)


class Finished(NamedTuple):
    """A leader's notification to rank 0: all samples of these prompts are drawn and scored.

    busy_seconds: time in which the engine had work, since the previous notification.
    """

    groups: tuple[int, ...]
    busy_seconds: float


class ResponseStream:
    """The engine's `RequestSource`, on every rank of a replica. The leader decides and broadcasts its decisions.

    `run` returns when a command arrives that is not reentrant. It interrupts the running responses, which continue at
    the next `run` with the weights that the engine has then; without `interrupts` it waits for them. `capacity` bounds
    the number of running responses, so that few have to be waited for.

    The worker's journal gets only responses that weights of one version have drawn completely: after a restart, the
    first tokens of others would be older than their recorded version.

    Conversations outlast interruptions too: their tools and environments answer meanwhile.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker, self.scorer, self.agent = worker, worker.scorer, worker.agent
        self._turns: TurnHandler | None = None  # of conversations, on the leader
        self.capacity = worker.config.rollout.max_num_seqs
        self.interrupts = worker.config.async_training.partial_rollout
        self._busy_seconds = self._waited = 0.0  # since the previous notification; for environments, since the last pop
        self._waiting: deque[Response] = deque()  # on the leader: not yet given to the engine
        self._interrupted: list[Response] = []
        self._given: list[Response] = []  # to the current call of the engine, by index of the request
        self._running: dict[int, Response] = {}  # by number
        self._next_number = 0
        self._results: list[TurnResult] = []  # on the leader: those that no rank has applied
        self._is_stopped = False
        self._version = 0
        self._since = 0.0  # time up to which busy seconds are counted
        self._open: Counter[int] = Counter()  # group -> number of unfinished samples
        self._done: dict[int, list[Response]] = {}  # group -> its finished samples
        self._unreported: list[int] = []  # finished groups, whose scores may be missing

    def add_responses(self, requests: Sequence[Request], groups: Sequence[int], rows: Sequence[int]) -> None:
        """Add responses to draw, all samples of each prompt. On the leader."""
        self._waiting.extend(Response(*sample) for sample in zip(requests, groups, rows, strict=True))
        self._open.update(groups)

    def pop_responses(self, groups: Iterable[int]) -> DataProto:
        """Remove the samples of finished prompts and return them, prompt by prompt in the order of their index, as
        columns with their weight versions. On the leader."""
        by_index = attrgetter("request.sample_index")
        responses = [response for group in groups for response in sorted(self._done.pop(group), key=by_index)]
        requests = [response.request for response in responses]
        trajectories = [response.done for response in responses if response.done is not None]
        width = self.worker.routed_width if self.worker.config.actor.router_replay.mode == "R3" else 0
        columns = response_columns(requests, trajectories, width)
        if self.agent is not None and self._turns is not None:
            columns = columns.union(conversation_columns(trajectories, self.worker.config.rollout.multi_turn))
            counts = self._turns.responder.metrics()
            if self.agent.makes_prompts:
                counts["perf/environment_wait_s"] = Sum(self._waited)
            columns.meta_info["metrics"] = merge([*columns.metrics, counts])
            self._waited = 0.0
        if self.worker.pictures is not None:
            columns.tokens["pictures"] = EncodedPictures.of_requests(requests).column()
        versions = np.array([response.versions for response in responses], np.int64).reshape(-1, 2)
        columns.samples["weight_version_min"], columns.samples["weight_version_max"] = versions.T
        num_recalled = sum(response.is_recalled for response in responses)
        if num_recalled:
            recalled: dict[str, Metric] = {ROLLOUTS_REUSED: Sum(float(num_recalled))}
            columns.meta_info["metrics"] = merge([*columns.metrics, recalled])
        return columns

    def run(self, sampling: SamplingParams, version: int) -> None:
        """Generate with the weights of `version`, and with random numbers of the step after it."""
        if self.worker.journal is not None:
            recall = version == self.worker.recalled_version
            self.worker.journal.begin(sampling, step=version + 1, version=version, recall=recall)
        self._version, self._is_stopped = version, False
        self._given, self._interrupted = self._interrupted, []
        self._since, seed = time.perf_counter(), self.worker.config.run.seed
        if self.agent is not None and self._turns is None:
            self._turns = self.agent.handler(sampling, seed)
        completions = self.worker.engine.generate(
            [response.conversation.next_request() for response in self._given],
            sampling,
            seed=seed,
            step=version + 1,
            source=self,
            on_finished=self._finish,
            on_step=self._step,
            should_abort=lambda: self._is_stopped and self.interrupts,
        )
        self._count_busy()
        for response, completion in zip(self._given, completions, strict=True):
            if completion.finish_reason == "abort":
                response.extend(completion, version)
                self._interrupted.append(response)
        self._given = []

    def take(self, idle: bool) -> Sequence[Request] | None:
        """The requests that the leader has received by now, within the capacity, and the next turns of conversations;
        see `RequestSource`."""
        decision = self._decide(idle) if self.worker.is_leader else None
        decision = self.worker.context.broadcast(self.worker.layout, decision)
        if decision is None:
            return []
        self._is_stopped, new, results = decision
        requests = [request for response in new if (request := self._start(response)) is not None]
        requests += [request for result in results if (request := self._follow(result)) is not None]
        return None if self._must_end else requests

    @property
    def _must_end(self) -> bool:
        """Whether the engine gets no more requests: others than those of conversations that have to be waited for."""
        return self._is_stopped and (self.interrupts or self.agent is None or not self._running)

    def _decide(self, idle: bool) -> tuple[bool, list[Response], list[TurnResult]] | None:
        """Whether to stop, the responses to start, and what follows turns of others; None: nothing of it."""
        self._is_stopped = self._poll()
        if idle:
            self._count_busy()
            if not self._has_news():
                began = time.perf_counter()
                wait_for_ranks(self._has_news)
                self._waited += time.perf_counter() - began if self._running else 0.0
        if self._must_end:
            return True, [], []
        new: list[Response] = []
        while self._can_start(len(new)):
            response = self._waiting.popleft()
            if not self._recall(response):
                new.append(response)
        results, self._results = self._results, []
        return (self._is_stopped, new, results) if self._is_stopped or new or results else None

    def _has_news(self) -> bool:
        """Whether an engine without work would get some, or end. On the leader."""
        self._since = time.perf_counter()  # it is not busy
        self._is_stopped = self._poll()
        return self._must_end or bool(self._results) or self._can_start()

    def _can_start(self, num_new: int = 0) -> bool:
        """Whether a response can start, beside `num_new` others. On the leader."""
        return not self._is_stopped and bool(self._waiting) and len(self._running) + num_new < self.capacity

    def _start(self, response: Response) -> Request | None:
        """Start a response, on every rank; None: its conversation waits for a prompt."""
        response.number, self._next_number = self._next_number, self._next_number + 1
        self._running[response.number] = response
        if self._turns is not None:
            record = self.worker.prompts["train"].record(response.row)
            self._turns.open(response.number, response.conversation, record)
        if self.agent is not None and self.agent.makes_prompts:
            return None
        self._given.append(response)
        return response.request

    def _follow(self, result: TurnResult) -> Request | None:
        """Continue or end a conversation, on every rank."""
        response = self._running[result.conversation]
        request = result.next_request(response.conversation)
        if request is None:
            self._end(response, result.trajectory(response.conversation))
        else:
            self._given.append(response)
        return request

    def _recall(self, response: Response) -> bool:
        """Finish a response that an earlier attempt has drawn; False if there is none."""
        journal = self.worker.journal
        done = journal.recall(response.request) if journal is not None else None
        if done is None:
            return False
        response.finish(done, self._version)
        response.is_recalled = True
        self._close(response, done)
        return True

    def _poll(self) -> bool:
        self._pump()
        if self._turns is not None:
            self._results += self._turns.poll()
        return self.worker.context.poll()

    def _finish(self, index: int, completion: Completion) -> None:
        self._count_busy()
        response = self._given[index]
        response.extend(completion, self._version)
        if self.agent is None:
            self._end(response, response.conversation.trajectory(completion.finish_reason))
        elif self._turns is not None:
            self._turns.add_turn(response.number)

    def _end(self, response: Response, done: Trajectory) -> None:
        """End a running response, on every rank."""
        del self._running[response.number]
        response.finish(done, self._version)
        if not self.worker.is_leader:
            return
        if self.worker.journal is not None and response.versions == (self._version, self._version):
            self.worker.journal.write(response.request, done)
        self._close(response, done)

    def _close(self, response: Response, done: Trajectory) -> None:
        """Start scoring a finished response. On the leader."""
        if self.scorer is not None:
            turns = {} if self.agent is None else turns_for_scorer(done)
            self.scorer.begin("train", response.row, done.token_ids, done.finish_reason, turns)
        self._done.setdefault(response.group, []).append(response)
        self._open[response.group] -= 1
        if not self._open[response.group]:
            del self._open[response.group]
            self._unreported.append(response.group)

    def _step(self) -> None:
        self.worker.tick()
        self._pump()

    def _pump(self) -> None:
        """Advance scoring, and notify rank 0 of prompts whose samples all have scores."""
        if self.scorer is not None:
            self.scorer.pump()
        finished = [group for group in self._unreported if self._has_scores(group)]
        if finished:
            self._unreported = [group for group in self._unreported if group not in finished]
            self._count_busy()
            self.worker.context.notify_controller(Finished(tuple(finished), self._busy_seconds))
            self._busy_seconds = 0.0

    def _count_busy(self) -> None:
        """Count the seconds until now as busy, if responses were running."""
        if self._running:
            now = time.perf_counter()
            self._busy_seconds, self._since = self._busy_seconds + now - self._since, now

    def _has_scores(self, group: int) -> bool:
        scorer = self.scorer
        return scorer is None or all(
            scorer.is_ready("train", response.row, response.done.token_ids, response.done.finish_reason)
            for response in self._done[group]
            if response.done is not None
        )
