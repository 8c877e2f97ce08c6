"""`hpcrl`, with one rank that stops in the middle of a phase; started by tests under mpiexec or srun.

HANG names the rank, the step and how: "3 2 stop" is rank 3 in update_actor of step 2, by SIGSTOP to itself; "spin"
loops for ever in Python, "lock" in C code that keeps the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from typing import Any

from hpcrl import cli
from hpcrl.roles.actor import ActorWorker

RANK, STEP, HOW = os.environ["HANG"].split()
PHASE = "update_actor (actor)"
update_actor = ActorWorker.update_actor


@functools.wraps(update_actor)
def hang(self: ActorWorker, batch: Any) -> Any:
    if (self.rank, batch.meta_info["step"]) == (int(RANK), int(STEP)):
        time.sleep(2.0)  # until the rank has said where it is
        stuck_here()
    return update_actor(self, batch)


def stuck_here() -> None:
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "lock":
        ctypes.PyDLL(None).pause()
    while True:
        time.sleep(0.01)


ActorWorker.update_actor = hang  # type: ignore[method-assign]

if __name__ == "__main__":
    cli.main(sys.argv[1:])
