"""Train as `python -m hpcrl train CONFIG ...`, altered: `python tools/gpu/altered_train.py train CONFIG ...`.

Weights are drawn on the device, for timing only: their numbers are others than those of `hpcrl train`. Where
HPCRL_GPU_KILLED names the run's folder, it is the job as it is, whose rank 1 is killed when the run has a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from hpcrl.cli import main
from hpcrl.runtime import job
from hpcrl.runtime.launcher import launched_rank

start_torch = job.start_torch


def start_and_draw(*args: Any, **options: Any) -> Any:
    world = start_torch(*args, **options)
    from hpcrl.runtime import platform  # imports torch

    platform.import_megatron()
    from tools.gpu.models import draw_on_the_device

    draw_on_the_device()
    return world


def kill_after_save(run: Path) -> None:
    while not (run / "checkpoints" / "latest").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # spawned children import this file again
    if killed := os.environ.get("HPCRL_GPU_KILLED"):
        if launched_rank(os.environ) == "1":
            threading.Thread(target=kill_after_save, args=[Path(killed)], daemon=True).start()
    else:
        job.start_torch = start_and_draw
    main()
