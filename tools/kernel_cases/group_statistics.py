from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case
from torch import Tensor

from hpcrl.kernels.reductions import group_moments, group_sum


def cases() -> Iterator[Case]:
    """The first is all launches and no bytes; the second is what the optimal token baseline adds up."""
    group = torch.randperm(16384, device="cuda") // 16
    score = torch.randn(16384, device="cuda")
    runs = {"hpcrl": lambda: group_moments(score, group), "torch eager": lambda: by_atomics(score, group)}
    yield Case("group_moments 16384 of 1024", runs, 2 * score.nbytes + group.nbytes + 3 * 8 * len(score))
    weights, some = torch.randn(8192, 8192, device="cuda", dtype=torch.float64), group[group < 512]
    sums = {"hpcrl": lambda: group_sum(weights, some), "torch eager": lambda: added(weights, some)}
    yield Case("group_sum 8192 x 8192 of 512", sums, weights.nbytes + weights.nbytes // 16)


def by_atomics(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.bincount(group).double()
    mean = added(score, group) / size
    squares = added((score.double() - mean[group]).square(), group)
    return size[group], mean[group], (squares / (size - 1).clamp(min=1)).sqrt()[group]


def added(x: Tensor, group: Tensor) -> Tensor:
    """In no fixed order on a GPU."""
    return x.new_zeros((int(group.max()) + 1, *x.shape[1:]), dtype=torch.float64).index_add(0, group, x.double())
