"""Processes that score, each of which can be killed and is then replaced."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, ClassVar, Protocol

from hpcrl.sandbox import fork_server, process_tree
from hpcrl.sandbox.worker_process import Answer, Fate, Outcome, Ready

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # a worker's start and its import of the user's file, on a cold parallel file system
END_SECONDS = 5.0  # for a worker's supervisor to end what is below it
MESSAGE_SECONDS = 10  # for a message on a node's own pipes
LATE_SECONDS = 5.0  # beyond the timeout that a worker with several requests keeps itself
AHEAD_BYTES = 2**15  # a request this small fits a pipe that nobody reads, so that a worker may have it early
FAILED_STARTS = 3  # in a row, and what waits scores 0


class Source(Protocol):
    """What the processes of a pool load and run; it goes to them by pickle. `topic` begins warnings."""

    topic: ClassVar[str]

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        """A process's whole life: one Ready, then an Answer to each (number, request)."""
        ...

    def load_error(self, why: str) -> Exception:
        """The error to raise when the user's code cannot be loaded."""
        ...


@dataclass
class _Job:
    number: int
    message: bytes  # (number, request), pickled
    timeout: float  # seconds
    start_at: float  # monotonic time, as all times here
    alone: bool = False  # a worker that ended was on it among others: it is run with no other, to tell which it was
    sent: float = 0.0
    deadline: float = float("inf")  # until its worker is on it


@dataclass
class _Worker:
    """One process below its supervisor, its pipe, and its requests in the order in which they were sent: it is on the
    first `ready.at_once` of them; one more may wait in the pipe, so that it need not wait while its rank is busy."""

    process: ForkServerProcess
    pipe: Connection
    ready: Ready | None = None
    jobs: dict[int, _Job] = field(default_factory=dict)
    deadline: float = field(default_factory=lambda: time.monotonic() + START_SECONDS)  # of its start

    @classmethod
    def start(cls, source: Source, memory_limit_mb: int | None, log_path: str | None) -> _Worker:
        pipe, far_end = fork_server.context().Pipe()
        process = fork_server.spawn(source.serve, (far_end, memory_limit_mb, log_path))
        far_end.close()
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            # A worker that stops in the middle of a message counts as dead; the rank must not wait for it.
            for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", MESSAGE_SECONDS, 0))
        return cls(process, pipe)

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def next_deadline(self) -> float:
        if self.ready is None:
            return self.deadline
        return min((job.deadline for job in self.jobs.values()), default=float("inf"))

    def takes(self, job: _Job) -> bool:
        """Whether it has room for this job."""
        if self.ready is None or any(other.alone for other in self.jobs.values()):
            return False
        ahead = len(job.message) <= AHEAD_BYTES
        return len(self.jobs) < (1 if job.alone else self.ready.at_once + ahead)

    def begin(self, since: float) -> None:
        """Sets the deadlines of the requests that the worker can be on since that time."""
        assert self.ready is not None
        late = LATE_SECONDS if self.ready.at_once > 1 else 0.0
        for job in itertools.islice(self.jobs.values(), self.ready.at_once):
            if job.deadline == float("inf"):
                job.deadline = max(job.sent, since) + job.timeout + late

    def kill(self) -> None:
        """Ends the process and whatever it has started, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self.pid, process_tree.END)
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has no session of its own yet, or is gone
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


class ProcessPool:
    """`num_workers` processes with `source`; a request holds its function's keyword arguments.

    A request that times out, crashes its process, raises, or returns no finite number gets an Outcome that says so.
    Its time counts from when its worker came to it, and an answer that is there counts however late it is heard: the
    rank may be busy with something else for long.
    """

    def __init__(
        self,
        source: Source,
        num_workers: int,
        timeout: float,
        *,
        memory_limit_mb: int | None = None,
        limit: RateLimit | None = None,
        log_path: str | None = None,
    ) -> None:
        self._source = source
        self._num_workers = num_workers
        self._timeout = timeout
        self._memory_limit_mb = memory_limit_mb
        self._limit = limit
        self._log_path = log_path
        self._numbers = itertools.count()
        self._pending: deque[_Job] = deque()
        self._outcomes: dict[int, Outcome] = {}
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        # multiprocessing's own exit hook joins the workers for ever; hooks run last come, first served.
        atexit.register(self.close)
        self._fill()
        self._wait_until_loaded(self._workers[0])

    def submit(self, request: dict[str, Any], weight: int = 1) -> int:
        """Queues a request, and returns its number; its timeout is `weight` times the usual one. Does not wait."""
        now = time.monotonic()
        start_at = now if self._limit is None else self._limit.reserve(now)
        number = next(self._numbers)
        self._pending.append(_Job(number, pickle.dumps((number, request)), weight * self._timeout, start_at))
        self.pump()
        return number

    def pump(self) -> None:
        """Gives waiting requests to free workers and takes their answers, as far as that goes without waiting."""
        self._progress(0.0)

    def has(self, number: int) -> bool:
        """Whether `take` would not wait."""
        return number in self._outcomes

    def take(self, number: int) -> Outcome:
        """Waits for a request's outcome, and hands it out once."""
        while number not in self._outcomes:
            self._progress(max(0.0, self._next_event() - time.monotonic()))
        return self._outcomes.pop(number)

    def close(self) -> None:
        """Kills the workers. Harmless when called twice."""
        atexit.unregister(self.close)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _progress(self, seconds: float) -> None:
        """One round; waits for at most `seconds` until a worker has answered or died."""
        if not self._pending and not any(worker.jobs or worker.ready is None for worker in self._workers):
            return
        self._give()
        heard = wait([worker.pipe for worker in self._workers], seconds)
        for worker in [worker for worker in self._workers if worker.pipe in heard]:
            self._hear(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.next_deadline <= now]:
            self._hear(worker)  # what it has said since `wait` looked
            self._end_if_late(worker, now)
        if self._failed_starts >= FAILED_STARTS:
            for job in self._pending:
                self._outcomes[job.number] = Outcome("crashes", None, "the workers do not start any more")
            self._pending.clear()
            self._failed_starts = 0
        self._fill()
        self._give()
        self._fill()  # a worker that died unheard is found out when it is given something

    def _next_event(self) -> float:
        """The time at which there is something to do though no worker stirs."""
        events = [worker.next_deadline for worker in self._workers]
        if self._pending and not self._is_full() and any(worker.takes(self._pending[0]) for worker in self._workers):
            events.append(self._pending[0].start_at)
        return min(events, default=time.monotonic())

    def _is_full(self) -> bool:
        under_way = sum(len(worker.jobs) for worker in self._workers)
        return self._limit is not None and under_way >= self._limit.max_concurrent

    def _fill(self) -> None:
        """Starts what workers are missing; after a failed start only when there is work."""
        if self._failed_starts and not self._pending:
            return
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker.start(self._source, self._memory_limit_mb, self._log_path))

    def _give(self) -> None:
        now = time.monotonic()
        while self._pending and self._pending[0].start_at <= now and not self._is_full():
            job = self._pending[0]
            free = [worker for worker in self._workers if worker.takes(job)]
            if not free:
                return
            self._pending.popleft()
            self._send(min(free, key=lambda worker: len(worker.jobs)), job)

    def _send(self, worker: _Worker, job: _Job) -> None:
        job.sent = time.monotonic()
        worker.jobs[job.number] = job
        worker.begin(job.sent)
        try:
            worker.pipe.send_bytes(job.message)
        except OSError:
            self._hear(worker)  # it may have answered before
            if worker in self._workers:
                self._end(worker, "crashes", "the process died")

    def _hear(self, worker: _Worker) -> None:
        """Takes all that a worker has said: it may be many scores, if the rank was busy."""
        why: str | None = None
        try:
            while why is None and worker.pipe.poll():
                message = worker.pipe.recv()
                why = self._heed(worker, message)
                if isinstance(message, Answer) and message.leaving:
                    self._retire(worker)
                    return
        except (EOFError, OSError):
            why = "the process died"
        if why is not None:
            self._end(worker, "crashes", why)

    def _heed(self, worker: _Worker, message: Ready | Answer) -> str | None:
        """Takes one message; returns why a new worker is of no use, if it says so."""
        if isinstance(message, Ready):
            if message.why is not None:
                return f"a new process cannot load the function: {message.why}"
            worker.ready = message
            self._failed_starts = 0
        elif worker.jobs.pop(message.number, None) is not None:
            self._outcomes[message.number] = message.outcome
            if not message.leaving:
                worker.begin(min(message.ended, time.monotonic()))
        return None

    def _end_if_late(self, worker: _Worker, now: float) -> None:
        if worker not in self._workers or worker.next_deadline > now:
            return
        if worker.ready is None:
            self._end(worker, "crashes", f"no start within {START_SECONDS:.0f} s")
            return
        late = next(job for job in worker.jobs.values() if job.deadline <= now)
        self._end(worker, "timeouts", f"longer than {late.timeout:g} s")

    def _end(self, worker: _Worker, fate: Fate, why: str) -> None:
        """Kills a worker. The request it was on has this fate; of several, each is tried once more on its own. A
        request that it had not come to waits for the next worker."""
        if worker.ready is None:
            self._failed_starts += 1
            log.warning("%s: %s", self._source.topic, why)
        begun = [job for job in worker.jobs.values() if job.deadline < float("inf")]
        if len(begun) == 1:
            self._outcomes[begun[0].number] = Outcome(fate, None, why)
            del worker.jobs[begun[0].number]
        elif begun:
            for job in begun:
                job.alone = True
        self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        """Ends a worker; the requests it has not answered wait for another."""
        for job in reversed(list(worker.jobs.values())):
            job.deadline = float("inf")
            self._pending.appendleft(job)
        self._workers.remove(worker)
        worker.kill()

    def _wait_until_loaded(self, worker: _Worker) -> None:
        """Refuses a function that cannot be loaded, before the run starts."""
        why: str | None = "the process that loads it died"
        try:
            if not worker.pipe.poll(START_SECONDS):
                why = f"not loaded after {START_SECONDS:.0f} s"
            else:
                worker.ready = worker.pipe.recv()
                assert worker.ready is not None
                why = worker.ready.why
        except (EOFError, OSError):
            pass
        if why is None:
            return
        self.close()
        raise self._source.load_error(why)


@dataclass
class TokenBucket:
    """Fills at `rate` per second up to what comes in one second, and is full at first (as verl's)."""

    rate: float
    level: float = 0.0
    time: float | None = None

    def reserve(self, amount: float, now: float) -> float:
        """Takes `amount`, and returns the time at which it will have been there; `now` never goes back.

        The level may become negative: those who come later wait for what those before them have taken.
        """
        if self.time is None:
            self.level = self.rate
        else:
            self.level = min(self.rate, self.level + (now - self.time) * self.rate)
        self.time = now
        start = now + max(0.0, (amount - self.level) / self.rate)
        self.level -= amount
        return start


@dataclass
class RateLimit:
    """When requests may start: at most so many at once, and so many, with their tokens, per minute (None: any)."""

    max_concurrent: int
    rpm: TokenBucket | None
    tpm: TokenBucket | None
    tokens_per_request: int

    @classmethod
    def per_minute(
        cls, max_concurrent: int, max_rpm: int | None, max_tpm: int | None, tokens_per_request: int
    ) -> RateLimit:
        rpm, tpm = (None if most is None else TokenBucket(most / 60) for most in (max_rpm, max_tpm))
        return cls(max_concurrent, rpm, tpm, tokens_per_request)

    def reserve(self, now: float) -> float:
        """The time at which the next request may start: first its turn among requests, then among tokens."""
        if self.rpm is not None:
            now = self.rpm.reserve(1, now)
        if self.tpm is not None:
            now = self.tpm.reserve(self.tokens_per_request, now)
        return now
