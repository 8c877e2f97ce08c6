"""A supervisor for a worker process: a parent that kills the worker and everything the worker has started.

The supervisor does nothing that could hang or fail: it waits for the rank to end, for `process_tree.END` from the rank,
and for the child to end. The kernel's means are not enough: a signal to a session does not reach processes that have
called setsid.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import tempfile
from collections.abc import Callable
from typing import NoReturn

from hpcrl.sandbox import process_tree
from hpcrl.sandbox.isolation import remove_folder

TICK_SECONDS = 0.2  # between two counts of the processes
MAX_PROCESSES = 256  # of one worker; a fork bomb exceeds it within a tick or two
LOG_BYTES = 2**20  # of one worker's output; the rest is dropped


def supervise(work: Callable[[], None], log: str | None = None) -> NoReturn:
    """Run `work` in a forked worker, and end this process when the worker ends. Call it first in a fork server's child.

    The worker is killed when the rank ends or sends `process_tree.END` to this process. A batch system's signals to all
    processes are ignored.

    The worker's output is appended to the file `log`, if given, and dropped otherwise. Its folder for temporary files
    is removed at the end.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    # Handlers that do nothing, instead of SIG_IGN: programs that `work` starts by exec get the defaults back.
    for signum in (signal.SIGCHLD, process_tree.END, *process_tree.STEP_SIGNALS):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a job; the rank handles it
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    process_tree.adopt_orphans()
    folder = tempfile.mkdtemp(prefix="hpcrl_")
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
    _wait(rank.sentinel, wake, printed, child, log)
    process_tree.kill_descendants()
    remove_folder(folder)
    os._exit(0)


def _wait(rank: int, wake: int, printed: int, child: int, log: str | None) -> None:
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
        alive = process_tree.descendants_of(os.getpid(), MAX_PROCESSES)
        if child not in alive or len(alive) > MAX_PROCESSES:
            return


def _redirect_output(writer: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, writer, writer)):
        os.dup2(file, number)
    os.close(nothing)


def _close_all_but(kept: tuple[int, ...]) -> None:
    """Close all files but `kept` and the standard ones, so that pipes are closed when the worker ends."""
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file > 2 and file not in kept:
            try:
                os.close(file)
            except OSError:
                pass
