"""The loop of a worker process of a `ProcessPool`: it answers requests from a pipe, one after the other.

Imported in the child: standard library only, so that a worker starts fast and stays small.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from hpcrl.sandbox import process_tree

HIGH = 512  # first file descriptor for saved streams, above those that a careless function closes
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Fate = Literal["ok", "timeouts", "crashes", "errors"]


class Outcome(NamedTuple):
    """The outcome of a request: `result` if `fate` is "ok", otherwise `why` says what failed.

    The result of a scorer is its `score` and extras; of a batched request it is a list of outcomes.
    """

    fate: Fate
    result: Any
    why: str = ""


class Ready(NamedTuple):
    """The worker's first message. at_once: how many requests it runs at a time. why: reason if it failed to load."""

    at_once: int = 1
    why: str | None = None


class Answer(NamedTuple):
    """The answer to a request. ended: monotonic time at which it was done (processes of a node share this clock).
    leaving: the worker uses too much memory, runs no more requests, and must be replaced."""

    number: int
    outcome: Outcome
    ended: float
    leaving: bool = False


def use_one_thread() -> None:
    """Limit libraries to one thread: a node has many workers, and each thread takes address space."""
    for name in THREADS:
        os.environ.setdefault(name, "1")


def answer_in_turn(
    pipe: Connection, answer: Callable[[dict[str, Any]], Outcome], memory_limit_mb: int | None = None
) -> None:
    """Send Ready, then answer one request after the other until the pipe closes."""
    pipe.send(Ready())
    me, surroundings = os.getpid(), Surroundings()
    while True:
        try:
            number, request = pipe.recv()
        except EOFError:
            return
        surroundings.restore()
        outcome = answer(request)
        if os.getpid() != me:  # the function has forked, and returned in the child too
            os._exit(0)
        leaving = outcome.fate == "errors" and memory_limit_mb is not None and address_space_mb() > memory_limit_mb / 2
        pipe.send(Answer(number, outcome, time.monotonic(), leaving))
        kill_leftovers()


class Surroundings:
    """Standard streams and working directory, restored before each request."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        high = min(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8)
        self._streams = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high) for number in range(3)]

    def restore(self) -> None:
        os.chdir(self._folder)
        for number, kept in enumerate(self._streams):
            os.dup2(kept, number)
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", encoding="utf-8", errors="replace", closefd=False))


def address_space_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() / 2**20


def kill_leftovers() -> None:
    """Kill processes that a request has left, including daemons. Those of multiprocessing stay for the next request."""
    me, parent = os.getpid(), os.getppid()
    for orphan in process_tree.children_of(parent):
        if orphan != me:
            process_tree.kill_tree(orphan)
    if children := process_tree.children_of(me):
        kept = {process.pid for process in multiprocessing.active_children()}
        for child in set(children) - kept:
            process_tree.kill_tree(child)
            try:
                os.waitpid(child, 0)
            except ChildProcessError:
                pass


def describe(error: BaseException) -> str:
    """One line of text: the type, the message, and the line that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = f" ({os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno})" if traceback else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
