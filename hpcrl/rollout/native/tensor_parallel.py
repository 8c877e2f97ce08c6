"""What the decoder says to the other ranks of its replica."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """A tensor-parallel group; with one rank every call is the identity."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        if size > 1 and group is None:
            raise ValueError(f"tensor parallelism over {size} ranks needs a process group")
        self.group = group
        self.rank = rank
        self.size = size

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def gather_columns(self, part: Tensor) -> Tensor:
        """(n, m) on each rank -> (n, size * m) on all, in rank order."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim=1)
