"""A pool of supervised worker processes; one that hangs or crashes is killed and replaced.

Of a batch with a limit of time, each request may run for so long that slow ones leave time for the others.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import pickle
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, ClassVar, Protocol

from hpcrl.sandbox import fork_server, process_tree
from hpcrl.sandbox.worker import MESSAGE_SECONDS, Answer, Fate, Outcome, Ready, limit_messages

log = logging.getLogger(__name__)

LEAST_BATCH_SECONDS = 600.0  # of a batch whose time is not given
PART_OF_TIMEOUTS = 0.25  # of the time that all of its requests would take if each of them timed out
RESERVED_PART = 0.75  # of the time of a batch, for the shares of its requests
MOST_CHARGED_SECONDS = 1.0  # charged for the start of a process; the rank may have been away meanwhile


class TimeBudget:
    """The time of a batch: the requests of a pool that have no answer yet. Times are in seconds.

    Each request has a share, in proportion to its timeout, whatever the others do. It may take what is not reserved
    for the shares of others, up to its timeout, and returns what it did not use. Ends and starts of processes are
    charged too, but take nothing from the shares.
    """

    def __init__(self, seconds: float | None, num_workers: int, setting: str) -> None:
        """Set up the budget.

        Args:
            seconds: seconds of a batch, which the workers share; None: LEAST_BATCH_SECONDS, or PART_OF_TIMEOUTS if that
                is more.
            setting: name of the setting in the template.
        """
        self.setting = setting
        self._seconds = seconds
        self._num_workers = num_workers
        self._total = self._left = 0.0  # seconds of one worker
        self._share = 1.0  # of a request's timeout

    def renew(self, timeouts: float) -> None:
        """Begin the time of a batch again.

        Args:
            timeouts: the sum of its requests' timeouts.
        """
        if self._seconds is None:
            self._total = max(LEAST_BATCH_SECONDS * self._num_workers, PART_OF_TIMEOUTS * timeouts)
        else:
            self._total = self._seconds * self._num_workers
        self._left = self._total
        self._share = RESERVED_PART * self._total / timeouts

    def take(self, timeout: float, others: float) -> float:
        """The limit of a request that begins.

        Args:
            others: the sum of the timeouts of those that have not begun.
        """
        return self._take(min(timeout, max(self._share * timeout, self._left - self._share * others)))

    def left_for(self, timeout: float, others: float) -> float:
        """The limit of a request that would begin again, with an equal share for the others that wait for that."""
        return min(timeout, max(0.0, self._left) * timeout / (timeout + others))

    def take_again(self, timeout: float, others: float) -> float:
        """The limit of a request that begins again."""
        return self._take(self.left_for(timeout, others))

    def give_back(self, seconds: float) -> None:
        """Return what a request has left of its limit."""
        self._left = min(self._left + seconds, self._total)

    def charge(self, seconds: float) -> None:
        """Charge the start or the end of a process."""
        self._left -= min(seconds, MOST_CHARGED_SECONDS)

    def _take(self, limit: float) -> float:
        self._left -= limit
        return limit


START_SECONDS = 120.0  # for a worker to start and import the user's file, on a cold parallel file system
END_SECONDS = 5.0  # for a worker's supervisor to kill its descendants
LATE_SECONDS = 5.0  # added to the timeout if the worker runs several requests and enforces it itself
AHEAD_BYTES = 2**15  # what fits the buffer of a pipe; a busy worker can be sent one more request up to this size
STUCK_SECONDS = 3 * MESSAGE_SECONDS  # for a worker to read, longer than it waits for a child of its own
FAILED_STARTS = 3  # in a row; then the requests that wait fail


class Source(Protocol):
    """What the processes of a pool load and run; sent to them by pickle. `topic` is the prefix of warnings."""

    topic: ClassVar[str]

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        """Run a worker process: send one Ready, then an Answer to each (number, request), until the pipe closes."""
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
    is_retried: bool = False  # it is run again, without others in its worker
    sent: float = 0.0
    began: float = 0.0
    limit: float = 0.0  # seconds that its worker has for it: its timeout, or less
    deadline: float = float("inf")  # until its worker runs it


@dataclass
class _Worker:
    """One process, its pipe, and its requests in the order in which they were sent.

    It runs the first `ready.at_once` of them. One more may be in the pipe, so that the worker has work while its rank
    is busy.
    """

    process: ForkServerProcess
    pipe: Connection
    ready: Ready | None = None
    jobs: dict[int, _Job] = field(default_factory=dict)
    slot: int = 0  # its place among the workers of the pool; its successor has the same
    idle_since: float = 0.0  # monotonic time of its last answer
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, source: Source, memory_limit_mb: int | None, log_path: str | None) -> _Worker:
        pipe, far_end = fork_server.context().Pipe()
        process = fork_server.spawn(source.serve, (far_end, memory_limit_mb, log_path))
        far_end.close()
        # A worker that stops in the middle of one counts as crashed; the rank must not wait for it.
        limit_messages(pipe)
        return cls(process, pipe)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def next_deadline(self) -> float:
        if self.ready is None:
            return self.started + START_SECONDS
        return min((job.deadline for job in self.jobs.values()), default=float("inf"))

    def takes(self, job: _Job) -> bool:
        """Whether the worker has room for this job."""
        if self.ready is None or any(other.is_retried for other in self.jobs.values()):
            return False
        ahead = len(job.message) <= AHEAD_BYTES
        return len(self.jobs) < (1 if job.is_retried else self.ready.at_once + ahead)

    def begin(self, since: float, limit_of: Callable[[_Job], float]) -> None:
        """Set the deadlines of the requests that the worker may be running since that time."""
        assert self.ready is not None
        late = LATE_SECONDS if self.ready.at_once > 1 else 0.0
        for job in itertools.islice(self.jobs.values(), self.ready.at_once):
            if job.deadline == float("inf"):
                job.began, job.limit = max(job.sent, since), limit_of(job)
                job.deadline = job.began + job.limit + late

    def kill(self) -> None:
        """Kill the process and all processes it has started, and wait until they have ended."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self.pid, process_tree.END)
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has no session of its own yet, or has ended
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


class ProcessPool:
    """A pool of `num_workers` processes that run `source`. A request is the keyword arguments of one call.

    A request that times out, crashes its process, or raises gets an Outcome with this fate. Its timeout counts from the
    time at which its worker begins it. An answer in the pipe counts however late it is read, because the rank may be
    busy with something else for long.

    With a `budget`, the limit of a request may be shorter than its timeout. What exceeds such a limit is run again when
    all others have run, if there is time for twice as long.
    """

    def __init__(
        self,
        source: Source,
        num_workers: int,
        timeout: float,
        *,
        memory_limit_mb: int | None = None,
        limit: RateLimit | None = None,
        budget: TimeBudget | None = None,
        log_path: str | None = None,
        on_answer: Callable[[int, float, float], None] | None = None,
    ) -> None:
        """Set up the pool.

        Args:
            on_answer: called with the number of the process, and the monotonic times at which it began and ended a
                request.
        """
        self._source = source
        self._on_answer = on_answer
        self._num_workers = num_workers
        self._timeout = timeout
        self._memory_limit_mb = memory_limit_mb
        self._limit = limit
        self._budget = budget
        self._log_path = log_path
        self._numbers = itertools.count()
        self._pending: deque[_Job] = deque()  # those that are run again are the last
        self._unbegun = 0.0  # sum of the timeouts of requests that no worker has begun
        self._is_new_batch = False  # there are requests since the budget was renewed
        self._outcomes: dict[int, Outcome] = {}
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        # Before multiprocessing's own exit hook, which joins the workers for ever: hooks run in reverse order.
        atexit.register(self.close)
        self._fill()
        self._wait_until_loaded(self._workers[0])

    def submit(self, request: dict[str, Any], weight: int = 1) -> int:
        """Queue a request and return its number. Its timeout is `weight` times the usual one. Does not wait."""
        now = time.monotonic()
        start_at = now if self._limit is None else self._limit.reserve(now)
        number = next(self._numbers)
        job = _Job(number, pickle.dumps((number, request)), weight * self._timeout, start_at)
        self._unbegun += job.timeout
        self._is_new_batch = True
        place = len(self._pending)
        while place and self._budget is not None and self._pending[place - 1].is_retried:
            place -= 1
        self._pending.insert(place, job)
        self.pump()
        return number

    def pump(self) -> None:
        """Send queued requests to free workers and receive answers, without waiting."""
        self._progress(0.0)

    def has(self, number: int) -> bool:
        """Whether `take` would not wait."""
        return number in self._outcomes

    def take(self, number: int) -> Outcome:
        """Wait for the outcome of a request and return it, once."""
        while number not in self._outcomes:
            if self._is_new_batch:
                self._renew_budget()
            self._progress(max(0.0, self._next_event() - time.monotonic()))
        return self._outcomes.pop(number)

    def close(self) -> None:
        """Kill the workers. May be called twice."""
        atexit.unregister(self.close)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _progress(self, seconds: float) -> None:
        """One round: wait for at most `seconds` until a worker answers or crashes."""
        if not self._pending and not any(worker.jobs or worker.ready is None for worker in self._workers):
            return
        self._assign()
        readable = wait([worker.pipe for worker in self._workers], seconds)
        for worker in [worker for worker in self._workers if worker.pipe in readable]:
            self._receive(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.next_deadline <= now]:
            self._receive(worker)  # messages since `wait` returned
            self._end_if_late(worker, now)
        if self._failed_starts >= FAILED_STARTS:
            for job in self._pending:
                self._outcomes[job.number] = Outcome("crashes", None, "worker processes fail to start")
            self._unbegun -= sum(job.timeout for job in self._pending if not job.limit)
            self._pending.clear()
            self._failed_starts = 0
        self._fill()
        self._assign()
        self._fill()  # sending may have found that a worker has crashed

    def _next_event(self) -> float:
        """The next time at which there is something to do without a message from a worker."""
        events = [worker.next_deadline for worker in self._workers]
        job = self._pending[0] if self._pending and not self._is_full() else None
        if job is not None and any(worker.takes(job) for worker in self._workers) and self._has_time(job):
            events.append(job.start_at)
        return min(events, default=time.monotonic())

    def _is_full(self) -> bool:
        under_way = sum(len(worker.jobs) for worker in self._workers)
        return self._limit is not None and under_way >= self._limit.max_concurrent

    def _fill(self) -> None:
        """Start missing workers; after a failed start only if requests are queued."""
        if self._failed_starts and not self._pending:
            return
        while len(self._workers) < self._num_workers:
            worker = _Worker.start(self._source, self._memory_limit_mb, self._log_path)
            worker.slot = min(set(range(self._num_workers)) - {other.slot for other in self._workers})
            self._workers.append(worker)

    def _assign(self) -> None:
        now = time.monotonic()
        while self._pending and self._pending[0].start_at <= now and not self._is_full():
            job = self._pending[0]
            if job.is_retried and not self._has_time(job):
                if any(worker.jobs for worker in self._workers):
                    return  # those may leave some
                self._pending.popleft()
                self._outcomes[job.number] = Outcome("timeouts", None, self._why_late(job))
                continue
            free = [worker for worker in self._workers if worker.takes(job)]
            if not free:
                return
            self._pending.popleft()
            self._send(min(free, key=lambda worker: len(worker.jobs)), job)

    def _has_time(self, job: _Job) -> bool:
        """Whether a request that is run again would have twice the time that it had, or its whole timeout."""
        if self._budget is None or not job.is_retried:
            return True
        return self._budget.left_for(job.timeout, self._waiting_again(job)) >= min(2 * job.limit, job.timeout)

    def _waiting_again(self, job: _Job | None = None) -> float:
        """The sum of the timeouts of other requests that wait to run again."""
        last = itertools.takewhile(lambda other: other.is_retried, reversed(self._pending))
        return sum(other.timeout for other in last if other is not job)

    def _limit_of(self, job: _Job) -> float:
        """Seconds for a request that a worker begins."""
        if self._is_new_batch:
            self._renew_budget()
        if not job.limit:
            self._unbegun -= job.timeout
        if self._budget is None:
            return job.timeout
        if job.is_retried:
            return self._budget.take_again(job.timeout, self._waiting_again(job))
        return self._budget.take(job.timeout, self._unbegun)

    def _renew_budget(self) -> None:
        """Give the requests since the last time their shares, also of what the running ones have taken."""
        self._is_new_batch = False
        if self._budget is None:
            return
        running = [job for worker in self._workers for job in worker.jobs.values() if job.deadline < float("inf")]
        self._budget.renew(self._unbegun + sum(job.timeout for job in running) + self._waiting_again())
        for job in running:
            job.limit = self._budget.take(job.limit, self._unbegun)
            job.deadline = job.began + job.limit

    def _give_back(self, job: _Job, ended: float) -> None:
        if self._budget is not None:
            self._budget.give_back(max(0.0, job.limit - max(0.0, ended - job.began)))

    def _send(self, worker: _Worker, job: _Job) -> None:
        job.sent = time.monotonic()
        worker.jobs[job.number] = job
        worker.begin(job.sent, self._limit_of)
        try:
            self._write(worker, job.message)
        except OSError:
            self._receive(worker)  # it may have answered before it crashed
            if worker in self._workers:
                self._end(worker, "crashes", "the process died")

    def _write(self, worker: _Worker, message: bytes) -> None:
        """Send a message, as `Connection.send_bytes`, and receive others meanwhile: a worker that is sending does not
        read. Raises OSError."""
        size = struct.pack("!i", len(message)) if len(message) < 2**31 else struct.pack("!iQ", -1, len(message))
        pipe, rest, poll = worker.pipe.fileno(), memoryview(size + message), select.poll()
        poll.register(pipe, select.POLLIN | select.POLLOUT)
        while rest and worker in self._workers:
            ready = poll.poll(STUCK_SECONDS * 1000)
            if not ready:
                raise TimeoutError
            if ready[0][1] == select.POLLOUT:
                rest = rest[os.write(pipe, rest[:AHEAD_BYTES]) :]
            else:
                self._receive(worker)

    def _receive(self, worker: _Worker) -> None:
        """Receive all messages of a worker: there may be many if the rank was busy."""
        why: str | None = None
        try:
            while why is None and worker.pipe.poll():
                message = worker.pipe.recv()
                why = self._handle(worker, message)
                if isinstance(message, Answer) and message.leaving:
                    self._retire(worker)
                    return
        except (EOFError, OSError):
            why = "the process died"
        if why is not None:
            self._end(worker, "crashes", why)

    def _handle(self, worker: _Worker, message: Ready | Answer) -> str | None:
        """Handle one message. Returns why a new worker cannot be used, if the message says so."""
        if isinstance(message, Ready):
            if message.why is not None:
                return f"a new process cannot load the function: {message.why}"
            worker.ready = message
            self._failed_starts = 0
            if self._budget is not None:
                self._budget.charge(time.monotonic() - worker.started)
        elif (job := worker.jobs.pop(message.number, None)) is not None:
            self._outcomes[message.number] = message.outcome
            self._give_back(job, message.ended)
            if self._on_answer is not None:
                one_at_a_time = worker.ready is not None and worker.ready.at_once == 1
                began = max(job.sent, worker.idle_since if one_at_a_time else 0.0)
                self._on_answer(worker.slot, began, max(began, message.ended))
            worker.idle_since = message.ended
            if not message.leaving:
                worker.begin(min(message.ended, time.monotonic()), self._limit_of)
        return None

    def _end_if_late(self, worker: _Worker, now: float) -> None:
        if worker not in self._workers or worker.next_deadline > now:
            return
        if worker.ready is None:
            self._end(worker, "crashes", f"no start within {START_SECONDS:.0f} s")
            return
        late = next(job for job in worker.jobs.values() if job.deadline <= now)
        if late.limit == late.timeout or late.is_retried:
            self._end(worker, "timeouts", self._why_late(late))
        else:
            del worker.jobs[late.number]
            self._retire(worker)
            late.is_retried, late.deadline = True, float("inf")
            self._pending.append(late)

    def _why_late(self, job: _Job) -> str:
        if job.limit == job.timeout or self._budget is None:
            return f"longer than {job.timeout:g} s"
        return f"longer than its share of {self._budget.setting}"

    def _end(self, worker: _Worker, fate: Fate, why: str) -> None:
        """Kill a worker. The request it was running gets this fate; if there were several, each is run again by itself.

        Requests that it had not begun are queued again.
        """
        if worker.ready is None:
            self._failed_starts += 1
            log.warning("%s: %s", self._source.topic, why)
        begun = [job for job in worker.jobs.values() if job.deadline < float("inf")]
        if len(begun) == 1:
            if fate != "timeouts":
                self._give_back(begun[0], time.monotonic())
            self._outcomes[begun[0].number] = Outcome(fate, None, why)
            del worker.jobs[begun[0].number]
        elif begun:
            for job in begun:
                job.is_retried = True
        self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        """Kill a worker and queue its unanswered requests again."""
        for job in reversed(list(worker.jobs.values())):
            job.deadline = float("inf")
            self._pending.appendleft(job)
        self._workers.remove(worker)
        began = time.monotonic()
        worker.kill()
        if self._budget is not None:
            self._budget.charge(time.monotonic() - began)

    def _wait_until_loaded(self, worker: _Worker) -> None:
        """Raise the source's `load_error` if a worker cannot load it."""
        try:
            worker.ready = worker.pipe.recv() if worker.pipe.poll(START_SECONDS) else None
            why = worker.ready.why if worker.ready else f"not loaded after {START_SECONDS:.0f} s"
        except (EOFError, OSError):
            why = "the process that loads it died"
        if why is not None:
            self.close()
            raise self._source.load_error(why)


@dataclass
class TokenBucket:
    """A token bucket: fills at `rate` per second, holds at most one second's worth, and starts full (as verl's)."""

    rate: float
    level: float = 0.0
    time: float | None = None

    def reserve(self, amount: float, now: float) -> float:
        """Take `amount` and return the time at which the bucket has held it. `now` never decreases.

        The level may become negative: later calls wait for what earlier ones have taken.
        """
        seconds = float("inf") if self.time is None else now - self.time
        self.level = min(self.rate, self.level + seconds * self.rate)
        self.time = now
        start = now + max(0.0, (amount - self.level) / self.rate)
        self.level -= amount
        return start


class RateLimit:
    """Limits of requests at the same time, and of requests and tokens per minute (None: no limit)."""

    def __init__(self, max_concurrent: int, max_rpm: int | None, max_tpm: int | None, tokens_per_request: int) -> None:
        self.max_concurrent, self._tokens_per_request = max_concurrent, tokens_per_request
        self._rpm, self._tpm = (None if most is None else TokenBucket(most / 60) for most in (max_rpm, max_tpm))

    def reserve(self, now: float) -> float:
        """The time at which the next request may start, according to the request limit and then the token limit."""
        if self._rpm is not None:
            now = self._rpm.reserve(1, now)
        if self._tpm is not None:
            now = self._tpm.reserve(self._tokens_per_request, now)
        return now
