"""A worker process of a `ProcessPool`, and its supervisor.

The supervisor does nothing that could hang or fail: it waits for the rank to end, for `process_tree.END` from the rank,
and for the child to end. The kernel's means are not enough: a signal to a session does not reach processes that have
called setsid.

Imported in the child: standard library only, so that a worker starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, NoReturn

from hpcrl.sandbox import process_tree
from hpcrl.sandbox.foreign_files import ERRORS
from hpcrl.sandbox.isolation import remove_folder

TICK_SECONDS = 0.2  # between two counts of the processes
MAX_PROCESSES = 256  # of one worker; a fork bomb exceeds it within a tick or two
MESSAGE_SECONDS = 10  # to send or receive a message on a pipe
LOG_BYTES = 2**20  # of one worker's output; the rest is dropped


def supervise(work: Callable[[], None], log: str | None = None, max_processes: int = MAX_PROCESSES) -> NoReturn:
    """Run `work` in a forked worker, and end this process when the worker ends. Call it first in a fork server's child.

    The worker is killed when the rank ends or sends `process_tree.END` to this process. A batch system's signals to all
    processes are ignored.

    The worker's output is appended to the file `log`, if given, and dropped otherwise. Its folder for temporary files
    is removed at the end.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    wake, wake_writer = process_tree.wake_on_signals()
    os.setsid()
    process_tree.adopt_orphans()
    folder = tempfile.mkdtemp(dir=util.get_temp_dir())  # of the rank, which multiprocessing hands on
    printed, print_writer = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            process_tree.signal_on_parent_death(supervisor)
            os.setsid()
            process_tree.raise_oom_score()
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, process_tree.END):
                signal.signal(signum, signal.SIG_DFL)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            _redirect_output(print_writer)
            for file in (wake, wake_writer, printed, print_writer):
                os.close(file)
            work()
        finally:
            os._exit(0)
    os.close(print_writer)
    _close_all_but((wake, wake_writer, printed, rank.sentinel))
    _wait(rank.sentinel, wake, printed, child, log, max_processes)
    process_tree.kill_descendants()
    remove_folder(folder)
    os._exit(0)


def _wait(rank: int, wake: int, printed: int, child: int, log: str | None, max_processes: int) -> None:
    """Return when the worker has ended, or must be killed."""
    files, num_logged = [rank, wake, printed], 0
    while True:
        ready, _, _ = select.select(files, [], [], TICK_SECONDS)
        if rank in ready or (wake in ready and process_tree.END in os.read(wake, 256)):
            return
        if printed in ready:
            text = os.read(printed, 1 << 16)
            if not text:
                files.remove(printed)
            elif log is not None and num_logged < LOG_BYTES:
                num_logged += len(text)
                with open(log, "ab") as file:
                    file.write(text)
        process_tree.reap()
        alive = process_tree.descendants_of(os.getpid(), max_processes)
        if child not in alive or len(alive) > max_processes:
            return


def _redirect_output(writer: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, writer, writer)):
        os.dup2(file, number)
    os.close(nothing)
    _open_stream(1, "stdout")  # with an encoding that takes what a scorer prints


def _open_stream(number: int, name: str) -> None:
    setattr(sys, name, open(number, "w", encoding="utf-8", errors=ERRORS, closefd=False))


def _close_all_but(files: tuple[int, ...]) -> None:
    """Close all files but these and the standard ones, so that pipes are closed when the worker ends."""
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file > 2 and file not in files:
            with contextlib.suppress(OSError):
                os.close(file)


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
        for number, saved in enumerate(self._streams):
            os.dup2(saved, number)
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name).closed:
                _open_stream(number, name)


def limit_messages(pipe: Connection) -> None:
    """Have a message that takes longer than MESSAGE_SECONDS to send or to receive raise OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", MESSAGE_SECONDS, 0))


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
        pool_processes = {process.pid for process in multiprocessing.active_children()}
        for child in set(children) - pool_processes:
            process_tree.kill_tree(child)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def describe(error: BaseException) -> str:
    """One line of text: the type, the message, and the line that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = f" ({os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno})" if traceback else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
