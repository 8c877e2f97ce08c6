"""Masked whitening in Triton: a program has one tile of the numbers in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen

TILE = 4096
NUM_WARPS = 8


@triton.jit(do_not_specialize=["count", "tiles"])
def moments(x, mask, parts, count, tiles, TILE: tl.constexpr):
    """parts: (3, tiles), of tile i the weights, the sum, and the squares around the tile's mean."""
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    weight = tl.load(mask + place, mask=place < count, other=0)
    counts, weight = weight != 0, weight.to(tl.float64)
    value = tl.load(x + place, mask=counts & (place < count), other=0.0).to(tl.float64)
    weights, total = tl.sum(weight), tl.sum(weight * value)
    away = tl.where(counts, value - total / tl.where(weights != 0.0, weights, 1.0), 0.0)
    tl.store(parts + tile, weights)
    tl.store(parts + tiles + tile, total)
    tl.store(parts + 2 * tiles + tile, tl.sum(weight * away * away))


@triton.jit(do_not_specialize=["count"])
def scaled(x, mean, scale, y, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float64)
    white = (value - tl.load(mean)) * tl.load(scale)
    tl.store(y + place, white.to(tl.float32).to(y.dtype.element_ty), mask=place < count)


class InTriton:
    """As `InTorch`, but for where the squares come from."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self._x, mask = x.contiguous(), mask.contiguous()
        self._tiles = triton.cdiv(x.numel(), TILE)
        self._parts = x.new_empty(3, self._tiles, dtype=torch.float64)
        if self._tiles:
            moments[(self._tiles,)](
                self._x, mask, self._parts, x.numel(), self._tiles, TILE=TILE, num_warps=NUM_WARPS
            )  # fmt: skip

    def sums(self) -> Tensor:
        return self._parts[:2].sum(1)

    def squares(self, mean: Tensor) -> Tensor:
        """What the tiles have around their own means, and how far these are from `mean`."""
        self._mean = mean
        weights, total, squares = self._parts
        away = total / torch.where(weights != 0, weights, 1.0) - mean
        return (squares + weights * away.square()).sum().reshape(1)

    def result(self, scale: Tensor) -> Tensor:
        y = torch.empty_like(self._x)
        if self._tiles:
            scaled[(self._tiles,)](self._x, self._mean, scale, y, y.numel(), TILE=TILE, num_warps=NUM_WARPS)
        return y


def specimens() -> list[Specimen]:
    return [
        Specimen(
            "masked_whiten moments",
            moments,
            {"x": "*fp32", "mask": "*i64", "parts": "*fp64", "count": "i64", "tiles": "i32"},
            {"TILE": TILE},
            NUM_WARPS,
        ),
        Specimen(
            "masked_whiten scaled",
            scaled,
            {"x": "*fp32", "mean": "*fp64", "scale": "*fp64", "y": "*fp32", "count": "i64"},
            {"TILE": TILE},
            NUM_WARPS,
        ),
    ]
