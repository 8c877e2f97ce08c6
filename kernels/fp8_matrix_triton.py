"""Rows in 8 bits in Triton: one program per row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.dispatch import FP8

MOST_AT_ONCE = 4096  # numbers of a program


@triton.jit
def quantize(values, numbers, scales, stride, cols, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """numbers, scales = the rows of `values` in FP8; a row is read twice, the second time from a cache."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    maxima = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, cols, BLOCK):
        part = tl.load(values + row * stride + first + column, mask=first + column < cols, other=0.0)
        maxima = tl.maximum(maxima, tl.abs(part.to(tl.float32)))
    largest = tl.max(maxima, 0)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, LARGEST), 1.0)
    tl.store(scales + row, scale)
    for first in range(0, cols, BLOCK):
        inside = first + column < cols
        part = tl.load(values + row * stride + first + column, mask=inside, other=0.0).to(tl.float32)
        number = tl.div_rn(part, tl.zeros_like(part) + scale)
        tl.store(numbers + row * cols + first + column, number.to(numbers.dtype.element_ty), mask=inside)


def constants(cols: int) -> dict[str, Any]:
    return {"LARGEST": torch.finfo(FP8).max, "BLOCK": min(MOST_AT_ONCE, triton.next_power_of_2(cols))}


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = values.shape
    numbers = torch.empty(rows, cols, dtype=FP8, device=values.device)
    scales = torch.empty(rows, 1, device=values.device)
    quantize[(rows,)](values, numbers, scales, values.stride(0), cols, **constants(cols))
    return numbers, scales
