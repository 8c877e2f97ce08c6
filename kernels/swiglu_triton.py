"""SwiGLU in Triton: a program has a piece of both halves of some rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen

TILE = 2048  # numbers of each half that a program has
WIDEST = 1024  # of them, those of one row


@triton.jit(do_not_specialize=["rows"])
def forward(x, y, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y (rows, WIDTH) = silu(gate) up of x, whose rows lie `stride` apart."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + column + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(x, dy, dx, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dx (rows, 2 WIDTH): dy up s (1 + gate (1 - s)) of the gate, with its sigmoid s, and dy gate s of up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + column + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    of_gate, of_up = grad * up * s * (1.0 + gate * (1.0 - s)), grad * gate * s
    place = row * (2 * WIDTH) + column
    tl.store(dx + place, of_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + place + WIDTH, of_up.to(dx.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Rows and columns of each half that a program has, a power of 2 each."""

    rows: int
    block: int

    @classmethod
    def of(cls, width: int) -> Tile:
        block = min(WIDEST, triton.next_power_of_2(width))
        return cls(TILE // block, block)

    def grid(self, rows: int, width: int) -> tuple[int, int]:
        return triton.cdiv(rows, self.rows), triton.cdiv(width, self.block)


class SwiGLU(torch.autograd.Function):
    """The input alone is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        ctx.save_for_backward(flat)
        rows, width = len(flat), flat.size(1) // 2
        y, tile = flat.new_empty(*x.shape[:-1], width), Tile.of(width)
        if y.numel():
            forward[tile.grid(rows, width)](
                flat, y, rows, flat.stride(0), WIDTH=width, ROWS=tile.rows, BLOCK=tile.block
            )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, width = len(x), x.size(1) // 2
        dx, tile = x.new_empty(*dy.shape[:-1], 2 * width), Tile.of(width)
        if dx.numel():
            backward[tile.grid(rows, width)](
                x, dy.contiguous(), dx, rows, x.stride(0), WIDTH=width, ROWS=tile.rows, BLOCK=tile.block
            )
        return dx


def specimens() -> list[Specimen]:
    """What is compiled to see registers and spills: a dense layer's width, and an expert's, of which a program has two
    rows."""
    found = []
    for width in (768, 14336):
        tile = Tile.of(width)
        sizes = {"WIDTH": width, "ROWS": tile.rows, "BLOCK": tile.block}
        integers = {"rows": "i32", "stride": "i32"}
        for kernel, names in ((forward, ("x", "y")), (backward, ("x", "dy", "dx"))):
            name = "forward" if kernel is forward else "backward"
            pointers = dict.fromkeys(names, "*bf16")
            found.append(Specimen(f"swiglu {name} {width}", kernel, pointers | integers, sizes))
    return found
