"""`python tools/gpu/killed.py train CONFIG ...` is `python -m hpcrl train CONFIG ...`, whose last rank is killed when
the run has a checkpoint. HPCRL_GPU_KILLED names the run's folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from hpcrl.cli import main
from hpcrl.runtime import job
from hpcrl.runtime.world import World

start_torch = job.start_torch


def start_and_wait(*args: object, **options: object) -> World:
    world = start_torch(*args, **options)  # type: ignore[arg-type]
    if world.rank == world.size - 1:
        threading.Thread(target=kill, args=[Path(os.environ["HPCRL_GPU_KILLED"])], daemon=True).start()
    return world


def kill(run: Path) -> None:
    while not (run / "checkpoints" / "latest").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # spawned children import this file again
    job.start_torch = start_and_wait
    main()
