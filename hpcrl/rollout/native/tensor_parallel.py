"""What the decoder says to the other ranks of its replica."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.model.exact import exact_sum


class TensorParallel:
    """A tensor-parallel group; with one rank every call is the identity. `exact` sums in rank order."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, exact: bool = False) -> None:
        if size > 1 and group is None:
            raise ValueError(f"tensor parallelism over {size} ranks needs a process group")
        self.group = group
        self.rank = rank
        self.size = size
        self.exact = exact

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks; `partial` may be overwritten."""
        if self.exact:
            return exact_sum(partial, self.group)
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

    def smallest(self, number: int) -> int:
        """The least of the ranks' numbers; collective."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)
