"""A tensor-parallel group, as decoding and sampling use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.model.exact import exact_sum


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group; with one rank every call is the identity. `exact` sums in rank order."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    exact: bool = False

    def __post_init__(self) -> None:
        if self.size > 1 and self.group is None:
            raise ValueError(f"tensor parallelism over {self.size} ranks needs a process group")

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks; `partial` may be overwritten."""
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
        """Return the minimum over ranks. Collective."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)
