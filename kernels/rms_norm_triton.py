"""RMSNorm in Triton: a program has some whole rows in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen

TILE = 4096  # numbers that a program holds at once, at least
# Programs of the backward pass, each with a sum for the weight's gradient: whole rounds on 132 processors, which hold
# 3 programs of narrow rows at once, 2 or 1 of wide ones.
MOST_PARTS, MOST_PARTS_OF_NARROW, NARROW = 528, 1584, 1024


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, residual, weight, y, rstd, rows, stride, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = weight * s * rstd of s = x, or of x + residual, which takes the residual's place; rows of x lie `stride`
    apart, of all else WIDTH."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    places = row[:, None] * WIDTH + column
    s = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        s += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        s = s.to(residual.dtype.element_ty)  # the norm is of what is kept
        tl.store(residual + places, s, mask=inside)
        s = s.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(s * s, 1) / WIDTH + eps)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(rstd + row, scale, mask=row < rows)
    tl.store(y + places, (s * scale[:, None] * w).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "each"])
def backward(
    x, weight, rstd, dy, dx, dw, rows, stride, each, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = rstd (w dy - x^ mean(w dy x^)) with x^ = x rstd; row i of dw is the sum of dy x^ over program i's rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in range(each):
        row = (program * each + number) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)
        places = row[:, None] * WIDTH + column
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(dy + places, mask=inside, other=0.0).to(tl.float32)
        weighted = grad * w
        mean = tl.sum(weighted * normed, 1)[:, None] / WIDTH
        tl.store(dx + places, ((weighted - normed * mean) * scale).to(dx.dtype.element_ty), mask=inside)
        sums += grad * normed
    tl.store(dw + program * WIDTH + tl.arange(0, BLOCK), tl.sum(sums, 0), mask=tl.arange(0, BLOCK) < WIDTH)


class Tile(NamedTuple):
    """Rows that a program holds at once, columns (a power of 2), and its warps."""

    rows: int
    block: int
    num_warps: int

    @classmethod
    def of(cls, width: int) -> Tile:
        block = triton.next_power_of_2(width)
        return cls(max(1, TILE // block), block, min(16, max(4, block // 512)))


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, shaped as x; x (rows, width) and rstd fp32 (rows,). x is added to a residual, which has no gaps."""
    flat = x.reshape(-1, x.size(-1))
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, width = flat.shape
    tile = Tile.of(width)
    y, rstd = torch.empty_like(flat, memory_format=torch.contiguous_format), flat.new_empty(rows, dtype=torch.float32)
    if rows:
        forward[(triton.cdiv(rows, tile.rows),)](
            flat, flat if residual is None else residual, weight, y, rstd, rows, flat.stride(0), eps,
            ADD=residual is not None, WIDTH=width, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
        )  # fmt: skip
    return y.view(x.shape), flat, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _forward(x, residual, weight, eps)[0]


class RMSNorm(torch.autograd.Function):
    """One fp32 number a row is kept for the backward pass, beside the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, flat, rstd = _forward(x, None, weight, eps)
        ctx.save_for_backward(flat, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        rows, width = x.shape
        tile = Tile.of(width)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = triton.cdiv(rows, tile.rows)
        each = triton.cdiv(tiles, MOST_PARTS if width > NARROW else MOST_PARTS_OF_NARROW)
        parts = triton.cdiv(tiles, each) if rows else 0
        dw = weight.new_empty(parts, width, dtype=torch.float32)
        if rows:
            backward[(parts,)](
                x, weight, rstd, dy.reshape(rows, width).contiguous(), dx, dw, rows, x.stride(0), each,
                WIDTH=width, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
            )  # fmt: skip
        return dx.view(dy.shape), dw.sum(0).to(weight.dtype), None


def specimens() -> list[Specimen]:
    """What is compiled to see registers and spills: rows of 128 (a head), of 4096 (a layer) and the widest."""
    found = []
    for width in (128, 4096, 8192):
        tile = Tile.of(width)
        sizes = {"WIDTH": width, "ROWS": tile.rows, "BLOCK": tile.block}
        pointers = dict.fromkeys(("x", "residual", "weight", "y"), "*bf16") | {"rstd": "*fp32"}
        found.append(
            Specimen(
                f"rms_norm forward {width}",
                forward,
                pointers | {"rows": "i32", "stride": "i32", "eps": "fp32"},
                sizes | {"ADD": True},
                tile.num_warps,
            )
        )
        pointers = dict.fromkeys(("x", "weight", "dy", "dx"), "*bf16") | dict.fromkeys(("rstd", "dw"), "*fp32")
        integers = dict.fromkeys(("rows", "stride", "each"), "i32")
        found.append(Specimen(f"rms_norm backward {width}", backward, pointers | integers, sizes, tile.num_warps))
    return found
