"""Loaded by the server that all children are forked from: it lives through what a batch system sends to every process.

Its children start with the defaults and an empty mask, so that they can be terminated; `supervisor.supervise` goes on
from there.
"""

import os
import signal

from hpcrl.launch import family

SERVER = os.getpid()


def _start_with_defaults() -> None:
    if os.getppid() != SERVER:  # a child's own children are its own affair
        return
    for signum in family.STEP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, family.STEP_SIGNALS)


for signum in family.STEP_SIGNALS:
    signal.signal(signum, signal.SIG_IGN)
os.register_at_fork(after_in_child=_start_with_defaults)
