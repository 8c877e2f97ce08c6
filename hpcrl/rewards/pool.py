"""Processes that run a custom reward function, each of which can be killed and is then replaced."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from hpcrl.launch import children
from hpcrl.launch.exits import InputError
from hpcrl.rewards import score_worker

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # a worker's start and its import of the user's file, on a cold parallel file system
FAILED_STARTS = 3  # in a row, and the rest of the batch scores 0 without waiting for more
WARNINGS = 3  # lines per batch that say why scores failed

Fate = Literal["ok", "timeouts", "crashes", "errors"]


@dataclass(frozen=True)
class Outcome:
    """What a request led to: `result` holds `score` and the extras if `fate` is "ok"; else `why` says what failed."""

    fate: Fate
    result: dict[str, float | str]
    why: str = ""


class _Worker:
    """One process, its pipe, and the request it is on."""

    def __init__(self, path: str, name: str, kwargs: dict[str, Any]) -> None:
        context = children.context()
        self.pipe, far_end = context.Pipe()
        # Not daemonic: a daemonic process may not have children, and reward functions do use multiprocessing.
        self.process = context.Process(target=score_worker.serve, args=(far_end, path, name, kwargs), daemon=False)
        self.process.start()
        far_end.close()
        self.ready = False
        self.request: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Ends the process and whatever it started, and waits until it is gone."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has no session of its own yet, or is gone
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class ScorePool:
    """`num_workers` processes with the function `name` of the file `path`; `timeout` is in seconds for one score.

    A request that times out, crashes its process, raises, or returns no finite number gets an Outcome that says so.
    """

    def __init__(self, path: str, name: str, kwargs: dict[str, Any], num_workers: int, timeout: float) -> None:
        self._source = (os.path.abspath(path), name, kwargs)
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        # multiprocessing's own exit hook joins the workers for ever; hooks run last come, first served.
        atexit.register(self.close)
        self._workers = [_Worker(*self._source) for _ in range(num_workers)]
        self._wait_until_loaded(self._workers[0])

    def score(self, requests: Sequence[dict[str, Any]]) -> list[Outcome]:
        """An outcome for each request, in their order; a request holds the function's keyword arguments."""
        outcomes: list[Outcome | None] = [None] * len(requests)
        pending = deque(range(len(requests)))
        self._failed_starts = 0
        while pending or any(worker.request is not None for worker in self._workers):
            if self._failed_starts >= FAILED_STARTS:
                for index in pending:
                    outcomes[index] = Outcome("crashes", {}, "the workers do not start any more")
                pending.clear()
            for worker in list(self._workers):
                if worker.ready and worker.request is None and pending:
                    self._assign(worker, pending, requests, outcomes)
            for worker in self._stirring():
                self._hear(worker, pending, outcomes)
            self._end_late(pending, outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Kills the workers. Harmless when called twice."""
        atexit.unregister(self.close)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _wait_until_loaded(self, worker: _Worker) -> None:
        """Refuses a function that cannot be loaded, before the run starts."""
        path, name, _ = self._source
        why = "the process that loads it died"
        try:
            if not worker.pipe.poll(START_SECONDS):
                why = f"not loaded after {START_SECONDS:.0f} s"
            else:
                kind, payload = worker.pipe.recv()
                worker.ready = kind == "ready"
                why = str(payload)
        except (EOFError, OSError):
            pass
        if not worker.ready:
            self.close()
            raise InputError(
                f"reward.custom_reward_function.path={path}: cannot load {name!r}: {why}; expected a Python file with "
                f"{name}(data_source, solution_str, ground_truth, extra_info)"
            )

    def _stirring(self) -> Iterable[_Worker]:
        """Workers that have sent something or died, at the latest when the next deadline is over."""
        deadlines = [worker.deadline for worker in self._workers if worker.request is not None or not worker.ready]
        if not deadlines:
            return []
        found = wait([worker.pipe for worker in self._workers], max(0.0, min(deadlines) - time.monotonic()))
        return [worker for worker in self._workers if worker.pipe in found]

    def _assign(
        self, worker: _Worker, pending: deque[int], requests: Sequence[dict[str, Any]], outcomes: list[Outcome | None]
    ) -> None:
        index = pending.popleft()
        worker.request = index
        worker.deadline = time.monotonic() + self._timeout
        try:
            worker.pipe.send(requests[index])
        except OSError:
            self._replace(worker, "crashes", "the process died between two scores", pending, outcomes)

    def _hear(self, worker: _Worker, pending: deque[int], outcomes: list[Outcome | None]) -> None:
        pipe: Connection = worker.pipe
        try:
            kind, payload = pipe.recv()
        except (EOFError, OSError):
            self._replace(worker, "crashes", "the process died", pending, outcomes)
            return
        if kind == "refused":
            self._replace(worker, "crashes", f"a new process cannot load the function: {payload}", pending, outcomes)
        elif kind == "ready":
            worker.ready = True
            self._failed_starts = 0
        elif worker.request is not None:
            outcomes[worker.request] = Outcome("ok", payload) if kind == "score" else Outcome("errors", {}, payload)
            worker.request = None

    def _end_late(self, pending: deque[int], outcomes: list[Outcome | None]) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now < worker.deadline:
                continue
            if worker.request is not None:
                self._replace(worker, "timeouts", f"longer than {self._timeout:g} s", pending, outcomes)
            elif not worker.ready:
                self._replace(worker, "crashes", f"no start within {START_SECONDS:.0f} s", pending, outcomes)

    def _replace(
        self, worker: _Worker, fate: Fate, why: str, pending: deque[int], outcomes: list[Outcome | None]
    ) -> None:
        """Kills a worker and starts another; the request it was on, if any, has this fate."""
        if worker.request is not None:
            outcomes[worker.request] = Outcome(fate, {}, why)
        if not worker.ready:
            self._failed_starts += 1
            log.warning("custom reward: %s", why)
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(*self._source)


def warn_of_failures(outcomes: Sequence[Outcome]) -> None:
    """Logs why scores failed, a few lines for a batch."""
    failed = [outcome for outcome in outcomes if outcome.fate != "ok"]
    for outcome in failed[:WARNINGS]:
        log.warning("reward: a response scored 0 (%s): %s", outcome.fate, outcome.why)
    if len(failed) > WARNINGS:
        log.warning("reward: %d more responses scored 0", len(failed) - WARNINGS)
