"""Responses that outlive a call of the engine: generation that goes on until something else has to be done."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hpcrl.controller.worker import Worker
from hpcrl.rollout.protocol import (
    Completion,
    FinishReason,
    Request,
    RolloutEngine,
    SamplingParams,
    Trajectory,
    known_first,
)
from hpcrl.runtime.mpi import wait_for_ranks
from hpcrl.workers.response_journal import ResponseJournal
from hpcrl.workers.scorer import ResponseScorer


@dataclass(eq=False)
class Response:
    """One sample, under way or done; `versions` are those of the weights that drew its first and its last token."""

    request: Request
    group: int  # rank 0's number of the prompt
    row: int
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    routed_experts: np.ndarray | None = None
    finish_reason: FinishReason = "abort"
    versions: tuple[int, int] | None = None
    is_recalled: bool = False  # an earlier attempt has drawn it

    def extend(self, more: Completion, version: int) -> None:
        self.finish_reason = more.finish_reason
        if not len(more.token_ids):
            return
        self.token_ids = np.concatenate([self.token_ids, more.token_ids])
        self.log_probs = np.concatenate([self.log_probs, more.log_probs])
        self.routed_experts = known_first(self.routed_experts, more.routed_experts)
        self.versions = (self.versions[0] if self.versions else version, version)

    def to_go_on(self) -> Request:
        return replace(self.request, prefix_ids=self.token_ids)

    def trajectory(self) -> Trajectory:
        return Trajectory.of_one_turn(
            Completion(self.token_ids, self.log_probs, self.finish_reason, self.routed_experts)
        )


class Finished(NamedTuple):
    """What a home tells rank 0: all samples of these prompts are there, and so are their scores."""

    groups: tuple[int, ...]
    busy_seconds: float  # that the engine had something to do since the last time


class ResponseStream:
    """Lives on every rank of a replica; the engine's `RequestSource`. The home decides, its peers do as it says.

    `run` returns when a command waits that cannot run meanwhile. Responses that are then under way are cut off, and go
    on at the next `run` under the weights of that time; without `interrupts` they are waited for. `capacity` is the
    number of responses that the engine is given at once, so that few are waited for.

    The journal gets the responses that weights of one version have drawn from the first to the last token. Others would
    be of no use to it: after a restart their first token would be older than rank 0 believes.
    """

    def __init__(
        self, worker: Worker, scorer: ResponseScorer | None, split: str, *, capacity: int, interrupts: bool
    ) -> None:
        self.worker = worker
        self.scorer = scorer
        self.split = split
        self.capacity = capacity
        self.interrupts = interrupts
        self.journal: ResponseJournal | None = None  # at home, where responses are kept for a restart
        self._busy_seconds = 0.0  # that nobody was told of
        self._waiting: deque[Response] = deque()  # at home: for the engine
        self._interrupted: list[Response] = []
        self._given: list[Response] = []  # to this call of the engine, by index
        self._num_running = 0
        self._is_stopped = False
        self._version = 0
        self._since = 0.0  # the seconds before are counted
        self._open: Counter[int] = Counter()  # group -> samples that are not finished
        self._done: dict[int, list[Response]] = {}  # group -> its finished samples
        self._untold: list[int] = []  # finished groups that may still wait for a score

    def add(self, responses: Sequence[Response]) -> None:
        """At home: more to draw, whole prompts."""
        self._waiting.extend(responses)
        self._open.update(response.group for response in responses)

    def pop(self, group: int) -> list[Response]:
        """At home: the samples of a prompt that rank 0 was told of, in the order of their index."""
        return sorted(self._done.pop(group), key=lambda response: response.request.sample_index)

    def run(self, engine: RolloutEngine, sampling: SamplingParams, *, seed: int, version: int) -> None:
        """Generates with the weights of `version`, and with random numbers of the step after it."""
        self._version, self._is_stopped = version, False
        self._given, self._interrupted = self._interrupted, []
        self._num_running = len(self._given)
        self._since = time.perf_counter()
        completions = engine.generate(
            [response.to_go_on() for response in self._given],
            sampling,
            seed=seed,
            step=version + 1,
            source=self,
            on_finished=self._finish,
            on_step=self._step,
            should_abort=lambda: self._is_stopped and self.interrupts,
        )
        self._count_busy()
        self._num_running = 0
        for response, completion in zip(self._given, completions, strict=True):
            if completion.finish_reason == "abort":
                response.extend(completion, version)
                self._interrupted.append(response)
        self._given = []

    def take(self, idle: bool) -> Sequence[Request] | None:
        """See `RequestSource`: what the home has got by now, within the capacity."""
        home = self.worker.is_home
        news = self.worker.desk.share(self.worker.layout, self._news(idle) if home else None)
        if news is None:
            return []
        self._is_stopped, responses = news
        self._given += responses
        self._num_running += len(responses)
        return None if self._is_stopped else [response.request for response in responses]

    def _news(self, idle: bool) -> tuple[bool, list[Response]] | None:
        """Whether to stop, and what to draw from now on; None: go on."""
        stop = self._attend()
        if idle and not stop and not self._waiting:
            wait_for_ranks(lambda: self._attend() or bool(self._waiting))
            stop, self._since = self._attend(), time.perf_counter()
        if stop:
            return True, []
        news: list[Response] = []
        while self._waiting and self._num_running + len(news) < self.capacity:
            response = self._waiting.popleft()
            if not self._is_known(response):
                news.append(response)
        return (False, news) if news else None

    def _is_known(self, response: Response) -> bool:
        """Whether an earlier attempt has drawn it: then it is finished."""
        done = self.journal.recall(response.request) if self.journal is not None else None
        if done is None:
            return False
        found = Completion(done.token_ids, done.log_probs, done.finish_reason, done.routed_experts)
        response.extend(found, self._version)
        response.is_recalled = True
        self._close(response)
        return True

    def _attend(self) -> bool:
        self._pump()
        return self.worker.desk.attend()

    def _finish(self, index: int, completion: Completion) -> None:
        self._count_busy()
        response = self._given[index]
        response.extend(completion, self._version)
        self._num_running -= 1
        if not self.worker.is_home:
            return
        if self.journal is not None and response.versions == (self._version, self._version):
            self.journal.write(response.request, response.trajectory())
        self._close(response)

    def _close(self, response: Response) -> None:
        """At home: it is finished, and can be scored."""
        if self.scorer is not None:
            self.scorer.begin(self.split, response.row, response.token_ids, response.finish_reason)
        self._done.setdefault(response.group, []).append(response)
        self._open[response.group] -= 1
        if not self._open[response.group]:
            del self._open[response.group]
            self._untold.append(response.group)

    def _step(self) -> None:
        self.worker.tick()
        self._pump()

    def _pump(self) -> None:
        """Lets scores go on, and tells rank 0 of prompts that have all of them."""
        if self.scorer is not None:
            self.scorer.pump()
        told = [group for group in self._untold if self._has_scores(group)]
        if told:
            self._untold = [group for group in self._untold if group not in told]
            self._count_busy()
            self.worker.desk.tell(Finished(tuple(told), self._busy_seconds))
            self._busy_seconds = 0.0

    def _count_busy(self) -> None:
        """Counts the seconds until now."""
        if self._num_running:
            now = time.perf_counter()
            self._busy_seconds, self._since = self._busy_seconds + now - self._since, now

    def _has_scores(self, group: int) -> bool:
        scorer = self.scorer
        return scorer is None or all(
            scorer.is_ready(self.split, response.row, response.token_ids, response.finish_reason)
            for response in self._done[group]
        )
