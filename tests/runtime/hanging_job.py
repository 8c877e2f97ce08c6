"""`hpcrl`, with one rank that hangs in the middle of a phase; started by tests under mpiexec or srun.

HANG names the rank, the step, the phase (update_actor, or generate, there after two tokens) and how: in
"3 2 generate stop" by SIGSTOP to itself; "spin" loops for ever in Python, "lock" in C code that keeps the interpreter's
lock.
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
from hpcrl.controller.register import Worker
from hpcrl.workers.actor import ActorWorker
from hpcrl.workers.rollout import RolloutWorker

RANK, STEP, PHASE, HOW = os.environ["HANG"].split()
TOKENS = 2

update_actor = ActorWorker.update_actor
after_token = RolloutWorker._on_step


@functools.wraps(update_actor)
def update_or_hang(self: ActorWorker, batch: Any) -> Any:
    hang_if_it_is_time(self, "update_actor")
    return update_actor(self, batch)


def go_on_or_hang(self: RolloutWorker) -> None:
    after_token(self)
    if self.status.ticks == TOKENS:
        hang_if_it_is_time(self, "generate")


def hang_if_it_is_time(worker: Worker, phase: str) -> None:
    if (worker.rank, worker.status.step, phase) == (int(RANK), int(STEP), PHASE):
        time.sleep(2.0)  # until the rank has said where it is
        stuck_here()


def stuck_here() -> None:
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "lock":
        ctypes.PyDLL(None).pause()
    while True:
        time.sleep(0.01)


ActorWorker.update_actor = update_or_hang  # type: ignore[method-assign]
RolloutWorker._on_step = go_on_or_hang  # type: ignore[method-assign]

if __name__ == "__main__":
    cli.main(sys.argv[1:])
