"""Statistics of groups in Triton: a lane has a group and goes through its samples, which a sort has put in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen

GROUPS = 32  # of a program: their samples lie apart, so that wider programs would only be fewer
COLUMNS = 256  # of a program
MOMENTS_WARPS, SUMS_WARPS = 1, 4


@triton.jit(do_not_specialize=["groups"])
def moments(score, order, offsets, size, mean, std, groups, GROUPS: tl.constexpr):
    """Three passes over the samples of GROUPS groups: their sums, their squares, and what each of them is told."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    begin = tl.load(offsets + group, mask=group < groups, other=0)
    count = tl.load(offsets + group + 1, mask=group < groups, other=0) - begin
    most = tl.max(count)
    total, squares = tl.zeros((GROUPS,), tl.float64), tl.zeros((GROUPS,), tl.float64)
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        total += tl.load(score + sample, mask=number < count, other=0.0).to(tl.float64)
    average = total / tl.maximum(count, 1).to(tl.float64)
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        its = tl.load(score + sample, mask=number < count, other=0.0).to(tl.float64)
        away = tl.where(number < count, its - average, 0.0)
        squares += away * away
    deviation = tl.sqrt(squares / tl.maximum(count - 1, 1).to(tl.float64))
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        tl.store(size + sample, count.to(tl.float64), mask=number < count)
        tl.store(mean + sample, average, mask=number < count)
        tl.store(std + sample, deviation, mask=number < count)


@triton.jit(do_not_specialize=["columns"])
def sums(x, order, offsets, found, columns, COLUMNS: tl.constexpr):
    """COLUMNS numbers of the sum of group program_id(0)."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for place in range(tl.load(offsets + group), tl.load(offsets + group + 1)):
        sample = tl.load(order + place)
        total += tl.load(x + sample * columns + column, mask=column < columns, other=0.0).to(tl.float64)
    tl.store(found + group * columns + column, total, mask=column < columns)


def group_moments(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    score = score.contiguous()
    order, offsets = _sorted(group)
    size, mean, std = (torch.empty_like(score, dtype=torch.float64) for _ in range(3))
    groups = len(offsets) - 1
    moments[(triton.cdiv(groups, GROUPS),)](
        score, order, offsets, size, mean, std, groups, GROUPS=GROUPS, num_warps=MOMENTS_WARPS
    )
    return size, mean, std


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    x = x.contiguous()
    order, offsets = _sorted(group)
    groups, columns = len(offsets) - 1, x[0].numel()
    found = x.new_empty(groups, *x.shape[1:], dtype=torch.float64)
    sums[(groups, triton.cdiv(columns, COLUMNS))](
        x, order, offsets, found, columns, COLUMNS=COLUMNS, num_warps=SUMS_WARPS
    )
    return found


def _sorted(group: Tensor) -> tuple[Tensor, Tensor]:
    """Samples by group, then by number; where the groups begin, and the last ends. int64."""
    ends = torch.bincount(group).cumsum(0)
    return torch.argsort(group, stable=True), torch.cat([ends.new_zeros(1), ends])


def specimens() -> list[Specimen]:
    tables = dict.fromkeys(("order", "offsets"), "*i64")
    results = dict.fromkeys(("size", "mean", "std"), "*fp64")
    return [
        Specimen(
            "group_statistics moments",
            moments,
            {"score": "*fp32"} | tables | results | {"groups": "i32"},
            {"GROUPS": GROUPS},
            MOMENTS_WARPS,
        ),
        Specimen(
            "group_statistics sums",
            sums,
            {"x": "*fp32"} | tables | {"found": "*fp64", "columns": "i32"},
            {"COLUMNS": COLUMNS},
            SUMS_WARPS,
        ),
    ]
