"""Sums over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Reduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # fp64 sums of one replica -> sums over all replicas


def one_replica(sums: torch.Tensor) -> torch.Tensor:
    """The `reduce` of a batch that is whole."""
    return sums


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of x * mask (same shape), over all or along dim; what x holds where mask is 0 does not matter."""
    return (x.masked_fill(mask == 0, 0.0) * mask).sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of x * mask / (sum of mask + 1e-8), over all or along dim."""
    return masked_sum(x, mask, dim) / (mask.sum(dim) + 1e-8)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, reduce: Reduce = one_replica) -> torch.Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the valid tokens of all replicas; 0 where mask is 0.

    x, mask: (B, T); B may be 0 on a replica, which calls `reduce` (two times) like the others. The variance is
    unbiased and taken in a second pass, all sums in fp64, so that the split over replicas does not show.
    """
    valid = mask.double()
    values = x.double().masked_fill(mask == 0, 0.0)
    count, total = reduce(torch.stack([valid.sum(), (values * valid).sum()]))
    deviation = (values - total / count.clamp(min=1)) * valid
    squares = reduce(deviation.square().sum().reshape(1))[0]
    variance = squares / (count - 1).clamp(min=1)
    return (deviation * torch.rsqrt(variance + 1e-8)).to(x.dtype)
