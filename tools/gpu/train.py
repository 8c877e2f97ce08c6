"""`python tools/gpu/train.py train CONFIG ...` is `python -m hpcrl train CONFIG ...`, with weights drawn on the device.

For timing only: their numbers are others than those of `hpcrl train`.
"""

from __future__ import annotations

from typing import Any

from hpcrl.cli import main
from hpcrl.runtime import job

start_torch = job.start_torch


def start_and_draw(*args: Any, **options: Any) -> Any:
    world = start_torch(*args, **options)
    from hpcrl.runtime import platform  # imports torch

    platform.import_megatron()
    from tools.gpu.weights import draw_on_the_device

    draw_on_the_device()
    return world


if __name__ == "__main__":  # spawned children import this file again
    job.start_torch = start_and_draw
    main()
