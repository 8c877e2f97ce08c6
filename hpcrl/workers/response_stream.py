"""Responses that are generated while training continues."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Metric, Sum, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.rollout.protocol import (
    Completion,
    FinishReason,
    Prefill,
    Request,
    SamplingParams,
    Trajectory,
    merge_routed_experts,
)
from hpcrl.runtime.mpi import wait_for_ranks
from hpcrl.workers.prompt_pictures import EncodedPictures
from hpcrl.workers.response_columns import response_columns

if TYPE_CHECKING:
    from hpcrl.workers.rollout import RolloutWorker


@dataclass(eq=False)
class Response:
    """One sample, running or finished. versions: of the weights that drew its first and its last token."""

    request: Request
    group: int  # rank 0's number of the prompt
    row: int
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    routed_experts: np.ndarray | None = None
    finish_reason: FinishReason = "abort"
    versions: tuple[int, int] | None = None
    prefill: Prefill = Prefill()
    is_recalled: bool = False  # drawn by an earlier attempt

    def extend(self, more: Completion | Trajectory, version: int) -> None:
        self.finish_reason = more.finish_reason
        self.prefill = self.prefill.plus(more.prefill)
        if not len(more.token_ids):
            return
        self.token_ids = np.concatenate([self.token_ids, more.token_ids])
        self.log_probs = np.concatenate([self.log_probs, more.log_probs])
        self.routed_experts = merge_routed_experts(self.routed_experts, more.routed_experts)
        self.versions = (self.versions[0] if self.versions else version, version)

    def continuation(self) -> Request:
        """The request for the tokens that are left to draw."""
        return replace(self.request, prefix_ids=self.token_ids)

    def trajectory(self) -> Trajectory:
        return Trajectory.from_completion(
            Completion(self.token_ids, self.log_probs, self.finish_reason, self.routed_experts, self.prefill)
        )


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
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker, self.scorer = worker, worker.scorer
        self.capacity = worker.config.rollout.max_num_seqs
        self.interrupts = worker.config.async_training.partial_rollout
        self._busy_seconds = 0.0  # since the previous notification
        self._waiting: deque[Response] = deque()  # on the leader: not yet given to the engine
        self._interrupted: list[Response] = []
        self._given: list[Response] = []  # to the current call of the engine, by index
        self._num_running = 0
        self._is_stopped = False
        self._version = 0
        self._since = 0.0  # time up to which busy seconds are counted
        self._open: Counter[int] = Counter()  # group -> number of unfinished samples
        self._done: dict[int, list[Response]] = {}  # group -> its finished samples
        self._unreported: list[int] = []  # finished groups, whose scores may be missing

    def add(self, requests: Sequence[Request], groups: Sequence[int], rows: Sequence[int]) -> None:
        """Add responses to draw, all samples of each prompt. On the leader."""
        self._waiting.extend(Response(*sample) for sample in zip(requests, groups, rows, strict=True))
        self._open.update(groups)

    def pop(self, groups: Iterable[int]) -> DataProto:
        """Remove the samples of finished prompts and return them, prompt by prompt in the order of their index, as
        columns with their weight versions. On the leader."""
        by_index = attrgetter("request.sample_index")
        responses = [response for group in groups for response in sorted(self._done.pop(group), key=by_index)]
        requests = [response.request for response in responses]
        found = response_columns(requests, [response.trajectory() for response in responses])
        if self.worker.pictures is not None:
            found.tokens["pictures"] = EncodedPictures.of_requests(requests).column()
        versions = np.array([response.versions for response in responses], np.int64).reshape(-1, 2)
        found.samples["weight_version_min"], found.samples["weight_version_max"] = versions.T
        num_recalled = sum(response.is_recalled for response in responses)
        if num_recalled:
            recalled: dict[str, Metric] = {"perf/rollouts_reused": Sum(float(num_recalled))}
            found.meta_info["metrics"] = merge([*found.metrics, recalled])
        return found

    def run(self, sampling: SamplingParams, version: int) -> None:
        """Generate with the weights of `version`, and with random numbers of the step after it."""
        if self.worker.journal is not None:
            recall = version == self.worker.recalled_version
            self.worker.journal.begin(sampling, step=version + 1, version=version, recall=recall)
        self._version, self._is_stopped = version, False
        self._given, self._interrupted = self._interrupted, []
        self._num_running = len(self._given)
        self._since = time.perf_counter()
        completions = self.worker.engine.generate(
            [response.continuation() for response in self._given],
            sampling,
            seed=self.worker.config.run.seed,
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
        """The requests that the leader has received by now, within the capacity; see `RequestSource`."""
        decision = self._decide(idle) if self.worker.is_leader else None
        decision = self.worker.context.broadcast(self.worker.layout, decision)
        if decision is None:
            return []
        self._is_stopped, responses = decision
        self._given += responses
        self._num_running += len(responses)
        return None if self._is_stopped else [response.request for response in responses]

    def _decide(self, idle: bool) -> tuple[bool, list[Response]] | None:
        """Whether to stop, and the responses to start; None: neither."""
        stop = self._poll()
        if idle and not stop and not self._waiting:
            wait_for_ranks(lambda: self._poll() or bool(self._waiting))
            stop, self._since = self._poll(), time.perf_counter()
        if stop:
            return True, []
        new: list[Response] = []
        while self._waiting and self._num_running + len(new) < self.capacity:
            response = self._waiting.popleft()
            if not self._recall(response):
                new.append(response)
        return (False, new) if new else None

    def _recall(self, response: Response) -> bool:
        """Finish a response that an earlier attempt has drawn; False if there is none."""
        journal = self.worker.journal
        done = journal.recall(response.request) if journal is not None else None
        if done is None:
            return False
        response.extend(done, self._version)
        response.is_recalled = True
        self._close(response)
        return True

    def _poll(self) -> bool:
        self._pump()
        return self.worker.context.poll()

    def _finish(self, index: int, completion: Completion) -> None:
        self._count_busy()
        response = self._given[index]
        response.extend(completion, self._version)
        self._num_running -= 1
        if not self.worker.is_leader:
            return
        if self.worker.journal is not None and response.versions == (self._version, self._version):
            self.worker.journal.write(response.request, response.trajectory())
        self._close(response)

    def _close(self, response: Response) -> None:
        """Start scoring a finished response. On the leader."""
        if self.scorer is not None:
            self.scorer.begin("train", response.row, response.token_ids, response.finish_reason)
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
        if self._num_running:
            now = time.perf_counter()
            self._busy_seconds, self._since = self._busy_seconds + now - self._since, now

    def _has_scores(self, group: int) -> bool:
        scorer = self.scorer
        return scorer is None or all(
            scorer.is_ready("train", response.row, response.token_ids, response.finish_reason)
            for response in self._done[group]
        )
