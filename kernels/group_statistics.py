"""Sums, means and deviations of groups of samples, such as those of one prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton


class Moments(NamedTuple):
    """Of each sample's group, fp64 (B,): size, mean, standard deviation (n - 1; 0 in a group of one)."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(score: Tensor, group: Tensor) -> Moments:
    """score: (B,). group: numbers int64 (B,).

    Triton adds in the order of the samples, without atomics, so that bits do not change from run to run. Beside the
    sort of the groups that moves the scores in twice and three numbers a sample out.
    """
    if len(score) and _in_triton(score):
        from hpcrl.kernels.group_statistics_triton import group_moments as fused

        return Moments(*fused(score, group))
    size = torch.bincount(group).double()
    mean = group_sum(score, group) / size
    squares = group_sum((score.double() - mean[group]).square(), group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return Moments(size[group], mean[group], std[group])


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """fp64 (G, ...): sums over each group's samples of x (B, ...). group: as for `group_moments`, and as there Triton
    adds in the order of the samples; each number is read once."""
    if x.numel() and _in_triton(x):
        from hpcrl.kernels.group_statistics_triton import group_sum as fused

        return fused(x, group)
    count = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros((count, *x.shape[1:]), dtype=torch.float64).index_add(0, group, x.double())


def _in_triton(x: Tensor) -> bool:
    """The kernels compute in fp64, and take it as well as what all kernels take."""
    return use_triton("group_statistics", x.new_empty(0, dtype=torch.float32) if x.dtype == torch.float64 else x)
