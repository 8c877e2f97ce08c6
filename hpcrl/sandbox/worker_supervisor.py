"""A child that runs a user's code under a parent of its own, which ends with it whatever that code has started.

The supervisor does nothing that could hang or fail: it waits for the rank to end, for `process_tree.END` from the rank,
and for the child to end. The kernel's means are not enough: a signal to a session misses what has called setsid.
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
from hpcrl.sandbox.mount_namespace import remove_folder

TICK_SECONDS = 0.2  # between two looks at how many processes there are
MOST_PROCESSES = 256  # of one child; a fork bomb has passed it within a tick or two
LOG_BYTES = 2**20  # of what one child prints; the rest is dropped


def supervise(work: Callable[[], None], log: str | None = None) -> NoReturn:
    """Runs `work` in a child, up to the end of this process. The first line of a child of `children.context()`.

    The rank ends it with `process_tree.END`. A batch system's signals to all processes change nothing here.

    What the child prints goes to the end of the file `log`, if it is given, and nowhere else. Its folder for temporary
    files is its own and is removed in the end.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    # Handlers that do nothing: what `work` starts by exec gets the defaults back, so that it can be terminated.
    for signum in (signal.SIGCHLD, process_tree.END, *process_tree.STEP_SIGNALS):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a job; it is the rank that answers
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    process_tree.adopt_orphans()
    folder = tempfile.mkdtemp(prefix="hpcrl_")
    printed, print_writer = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            process_tree.die_with(supervisor)
            os.setsid()
            process_tree.raise_oom_score()
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, process_tree.END):
                signal.signal(signum, signal.SIG_DFL)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            _redirect(print_writer)
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
    """Until the child has ended, or must."""
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
        alive = process_tree.descendants_of(os.getpid(), MOST_PROCESSES)
        if child not in alive or len(alive) > MOST_PROCESSES:
            return


def _redirect(writer: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, writer, writer)):
        os.dup2(file, number)
    os.close(nothing)


def _close_all_but(kept: tuple[int, ...]) -> None:
    """So that pipes end when the child does, and not only when its supervisor does; standard files stay."""
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file > 2 and file not in kept:
            try:
                os.close(file)
            except OSError:
                pass
