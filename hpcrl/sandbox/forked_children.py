"""A process that has loaded code once and forks a child for each key of its requests, which it limits and replaces.

It runs in a worker of a `ProcessPool`. Requests of one key reach one child, in turn; children of other keys run beside
it, and do not fail with it.

Imported in the child: standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from hpcrl.sandbox import process_tree
from hpcrl.sandbox.isolation import remove_folder
from hpcrl.sandbox.worker import Answer, Outcome, Ready, address_space_mb, describe, limit_messages

TICK_SECONDS = 0.5  # between two looks at what children use
END_SECONDS = 5.0  # for a child to end by itself
FIRST, LAST = "first", "last"  # entries of requests: the first of a key starts its child, the last ends it

Serve = Callable[[dict[str, Any]], Outcome]


class ChildLimits(NamedTuple):
    """Limits of a child. seconds: of one request. memory_mb: of the child, beyond what it is forked with, and of it and
    its descendants together. processes: of these. file_mb: of each file."""

    seconds: float
    memory_mb: int
    processes: int
    file_mb: int


@dataclass
class _Child:
    pid: int
    pipe: Connection
    folder: str  # for temporary files
    number: int | None = None  # of the request that it runs
    is_last: bool = False
    deadline: float = float("inf")  # monotonic time


@dataclass
class ForkedChildren:
    """make: called in each new child; returns what answers its requests. at_once: requests that run at the same
    time."""

    pipe: Connection
    make: Callable[[], Serve]
    limits: ChildLimits
    at_once: int
    _children: dict[Any, _Child] = field(default_factory=dict)
    _waiting: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)

    def run(self) -> None:
        """Send Ready, then answer each (number, request) until the pipe closes."""
        process_tree.adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.pipe.send(Ready(self.at_once))
        looked = time.monotonic()
        while self._receive():
            self._begin()
            now = time.monotonic()
            for key, child in [it for it in self._children.items() if it[1].deadline <= now]:
                self._end(key, Outcome("timeouts", None, f"longer than {self._seconds(child):g} s"))
            if now - looked > TICK_SECONDS:
                self._look()
                looked = now

    def _seconds(self, child: _Child) -> float:
        return END_SECONDS if child.is_last else self.limits.seconds

    def _receive(self) -> bool:
        """Wait for messages and handle them. False if the pipe has closed."""
        pipes: dict[Any, Any] = {child.pipe: key for key, child in self._children.items()}
        for pipe in wait([self.pipe, *pipes], TICK_SECONDS):
            if pipe is self.pipe:
                try:
                    self._waiting.append(self.pipe.recv())
                except EOFError:
                    return False
            elif (child := self._children.get(pipes[pipe])) is not None:
                self._answer(pipes[pipe], child)
        return True

    def _begin(self) -> None:
        """Send requests that wait to their children, as many as may run."""
        running = sum(child.number is not None for child in self._children.values())
        while self._waiting and running < self.at_once:
            number, request = self._waiting.popleft()
            key = request["key"]
            if request.get(FIRST) and key not in self._children:
                try:
                    self._children[key] = self._fork()
                except OSError as error:
                    self._reply(number, Outcome("crashes", None, f"no process: {error.strerror}"))
                    continue
            child = self._children.get(key)
            if child is None:
                done = request.get(LAST, False)
                self._reply(number, Outcome("ok", None) if done else Outcome("crashes", None, "its process has ended"))
                continue
            if child.number is not None:  # the leader does not wait for it
                self._end(key, Outcome("crashes", None, "cancelled"))
                self._reply(number, Outcome("ok", None))
                continue
            child.number, child.is_last = number, request.get(LAST, False)
            child.deadline = time.monotonic() + self._seconds(child)
            running += 1
            try:
                child.pipe.send(request)
            except OSError:
                self._died(key, child)

    def _answer(self, key: Any, child: _Child) -> None:
        """Pass on a child's answer; it may have died instead."""
        try:
            outcome = child.pipe.recv()
        except (EOFError, OSError):
            self._died(key, child)
            return
        number, child.number, child.deadline = child.number, None, float("inf")
        if child.is_last:
            self._end(key, None)
        if number is not None:
            self._reply(number, outcome)

    def _look(self) -> None:
        """End children that use too much, and processes whose child has ended."""
        for key, child in list(self._children.items()):
            tree = [child.pid, *process_tree.descendants_of(child.pid, self.limits.processes)]
            if len(tree) > self.limits.processes:
                self._end(key, Outcome("crashes", None, f"more than {self.limits.processes} processes"))
            elif len(tree) > 1 and sum(map(process_tree.proportional_bytes, tree)) > self.limits.memory_mb << 20:
                self._end(key, Outcome("crashes", None, f"more than {self.limits.memory_mb} MB of memory"))
        known = {child.pid for child in self._children.values()}
        for orphan in set(process_tree.children_of(os.getpid())) - known:
            process_tree.kill_tree(orphan)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)

    def _died(self, key: Any, child: _Child) -> None:
        number, child.number = child.number, None
        code = self._end(key, None)
        why = f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        if number is not None:
            self._reply(number, Outcome("crashes", None, why))

    def _end(self, key: Any, outcome: Outcome | None) -> int:
        """Kill a child, and return its exit code.

        Args:
            outcome: outcome of the request that it runs, if any.
        """
        child = self._children.pop(key)
        process_tree.kill_tree(child.pid)
        _, status = os.waitpid(child.pid, 0)
        child.pipe.close()
        remove_folder(child.folder)
        if child.number is not None and outcome is not None:
            self._reply(child.number, outcome)
        return os.waitstatus_to_exitcode(status)

    def _reply(self, number: int, outcome: Outcome) -> None:
        self.pipe.send(Answer(number, outcome, time.monotonic()))

    def _fork(self) -> _Child:
        mine, its = Pipe()
        folder = tempfile.mkdtemp()
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                mine.close()
                self.pipe.close()
                for other in self._children.values():
                    other.pipe.close()
                _serve(its, self.make, self.limits, folder, me)
            finally:
                os._exit(0)
        its.close()
        limit_messages(mine)  # a child that stops in the middle of one is killed
        return _Child(pid, mine, folder)


def _serve(pipe: Connection, make: Callable[[], Serve], limits: ChildLimits, folder: str, parent: int) -> None:
    """A child: answer requests until the last one, or until the pipe closes."""
    process_tree.signal_on_parent_death(parent)
    process_tree.adopt_orphans()
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    space_mb = math.ceil(address_space_mb()) + limits.memory_mb
    for limit, most_mb in ((resource.RLIMIT_AS, space_mb), (resource.RLIMIT_FSIZE, limits.file_mb)):
        hard = resource.getrlimit(limit)[1]
        most = most_mb << 20 if hard == resource.RLIM_INFINITY else min(most_mb << 20, hard)
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing more is an OSError
    me, serve = os.getpid(), make()
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            try:
                outcome = serve(request)
            except BaseException as error:
                outcome = Outcome("errors", None, describe(error))
            if os.getpid() != me:  # the code has forked, and returned in the child too
                return
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            pipe.send(outcome)
