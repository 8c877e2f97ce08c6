"""What a rank reports when the memory of its GPU is not enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hpcrl.launch import accelerator
from hpcrl.launch.whereabouts import Whereabouts

GIB = 2**30


def explained(
    error: BaseException, rank: int, here: Whereabouts, advice: Callable[[], str], snapshot: Path | None
) -> torch.OutOfMemoryError:
    """`error` with the rank, its phase, what was allocated there, `advice()`, and where the memory snapshot is.

    snapshot: the file for it; None where allocations are not recorded.
    """
    allocated, reserved = accelerator.take_peak_bytes()
    parts = [
        str(error).split(" If reserved")[0],  # torch goes on with advice that holds already, and a link
        f"rank {rank} ({here.role or 'no role'}, {here.phase}) had at most {allocated / GIB:.2f} GiB allocated and "
        f"{reserved / GIB:.2f} GiB reserved in this phase",
        advice(),
        _snapshot(snapshot),
    ]
    return torch.OutOfMemoryError("; ".join(part for part in parts if part)).with_traceback(error.__traceback__)


def _snapshot(path: Path | None) -> str:
    if path is None:
        return "run.memory_snapshot=true writes a memory snapshot next time"
    try:
        is_written = accelerator.dump_memory_history(path)
    except (OSError, RuntimeError) as error:
        return f"the memory snapshot could not be written: {error}"
    return f"memory snapshot: {path}, to be opened at https://pytorch.org/memory_viz" if is_written else ""
