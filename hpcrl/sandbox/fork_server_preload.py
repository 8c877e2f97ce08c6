"""Preloaded by the fork server of `fork_server.start`: the server ignores a batch system's signals and removes files.

Batch systems send signals to every process of a job. The server ignores them; its children start with the defaults and
an empty mask, so that they can be terminated, and `worker_supervisor.supervise` installs its own handlers.

A rank that was killed removes no files. The files through which it reaches its server are removed when the server ends,
which is when the rank and all of its children have ended.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal

from hpcrl.sandbox.fork_server import FOLDER
from hpcrl.sandbox.process_tree import STEP_SIGNALS


def remove(folder: str, server: int) -> None:
    if os.getpid() == server:
        shutil.rmtree(folder, ignore_errors=True)


if FOLDER in os.environ:
    os.setpgid(0, 0)  # MPICH's launcher ends an aborted job by killing the ranks' process groups
    atexit.register(remove, os.environ.pop(FOLDER), os.getpid())

SERVER = os.getpid()


def _restore_defaults() -> None:
    if os.getppid() != SERVER:  # a child's own children keep what the child has set
        return
    for signum in STEP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)


for signum in STEP_SIGNALS:
    signal.signal(signum, signal.SIG_IGN)
os.register_at_fork(after_in_child=_restore_defaults)
