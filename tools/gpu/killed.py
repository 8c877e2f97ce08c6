"""`python tools/gpu/killed.py train CONFIG ...` is `python -m hpcrl train CONFIG ...`, whose rank 1 is killed when the
run has a checkpoint. HPCRL_GPU_KILLED names the run's folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from hpcrl.cli import main
from hpcrl.runtime.launcher import launched_rank


def kill_after_save() -> None:
    while not Path(os.environ["HPCRL_GPU_KILLED"], "checkpoints", "latest").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # spawned children import this file again
    if launched_rank(os.environ) == "1":
        threading.Thread(target=kill_after_save, daemon=True).start()
    main()
