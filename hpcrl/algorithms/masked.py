"""Sums over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from hpcrl.kernels.reductions import masked_values

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
    """(x - mean) * rsqrt(var + 1e-8) with mean and unbiased variance of the valid tokens of all replicas.

    x, mask: (B, T); B may be 0 on a replica, which calls `reduce` (two times) like the others. The variance is taken
    in a second pass, all sums in fp64, so that the split over replicas does not show. Fewer than two valid tokens on
    all replicas give 0 everywhere (verl raises).

    Quirks of verl: tokens with mask 0 are shifted and scaled like the others, so a caller who wants 0 there masks the
    result; means divide by count + 1e-8; what is done with the count is done in the dtype of the mask, fp32 for
    integers, which shows under fp64 values. One that is not followed: under fp32 verl sums in fp32, and where all
    values are equal what it returns is that rounding error times 1e4; here it is 0.
    """
    values = masked_values(x, mask)
    count, total = reduce(values.sums())
    n = count.to(torch.promote_types(mask.dtype, torch.float32))
    squares = reduce(values.squares(total / (n + 1e-8)))[0]
    variance = squares / (n + 1e-8) * (n / (n - 1).clamp(min=1))
    return values.result(torch.where(count > 1, torch.rsqrt(variance + 1e-8), 0.0))


def finite_outside(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x with 0 for each NaN and infinity that stands where mask is 0; finite numbers there stay, as in verl."""
    return x.masked_fill((mask == 0) & ~x.isfinite(), 0.0)
