from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case

from hpcrl.kernels.checksum import add_checksum

ROWS, COLS = 17920, 1536


def cases() -> Iterator[Case]:
    """A weight of the rollout, and that of the actor in fp32, which is rounded first."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(ROWS, COLS, device="cuda", dtype=dtype)
        runs = {"hpcrl": lambda values=values: add_checksum(total, values, 0, 0, torch.bfloat16)}
        yield Case(f"checksum of {str(dtype).removeprefix('torch.')}", runs, values.nbytes, only_reads=True)
