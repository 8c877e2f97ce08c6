"""RMSNorm, SwiGLU and rotary position embedding in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_TILE = 4096  # minimum numbers that a program holds at a time
# Programs of the backward pass, each with a sum for the weight's gradient: whole rounds on 132 processors, which hold
# 3 programs of narrow rows at once, 2 or 1 of wide ones.
MAX_PARTS, MAX_PARTS_NARROW, NARROW = 528, 1584, 1024


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward(
    x, residual, weight, y, rstd, rows, stride, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = weight * s * rstd of s = x, or of s = x + residual, which overwrites the residual. Rows of x have `stride`,
    all others WIDTH."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    places = row[:, None] * WIDTH + column
    s = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        s += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        s = s.to(residual.dtype.element_ty)  # the norm is that of the stored sum
        tl.store(residual + places, s, mask=inside)
        s = s.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(s * s, 1) / WIDTH + eps)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(rstd + row, scale, mask=row < rows)
    tl.store(y + places, (s * scale[:, None] * w).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "each"])
def rms_norm_backward(
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


class NormTile(NamedTuple):
    """Rows per program, columns (a power of 2), and warps."""

    rows: int
    block: int
    num_warps: int

    @classmethod
    def of(cls, width: int) -> NormTile:
        block = triton.next_power_of_2(width)
        return cls(max(1, NORM_TILE // block), block, min(16, max(4, block // 512)))


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, shaped as x; x (rows, width); and rstd fp32 (rows,). x is added to a contiguous residual."""
    flat = x.reshape(-1, x.size(-1))
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, width = flat.shape
    tile = NormTile.of(width)
    y, rstd = torch.empty_like(flat, memory_format=torch.contiguous_format), flat.new_empty(rows, dtype=torch.float32)
    if rows:
        rms_norm_forward[(triton.cdiv(rows, tile.rows),)](
            flat, flat if residual is None else residual, weight, y, rstd, rows, flat.stride(0), eps,
            ADD=residual is not None, WIDTH=width, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
        )  # fmt: skip
    return y.view(x.shape), flat, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, residual, weight, eps)[0]


class RMSNorm(torch.autograd.Function):
    """Keeps one fp32 number per row for the backward pass, and the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, flat, rstd = _norm(x, None, weight, eps)
        ctx.save_for_backward(flat, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        rows, width = x.shape
        tile = NormTile.of(width)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = triton.cdiv(rows, tile.rows)
        each = triton.cdiv(tiles, MAX_PARTS if width > NARROW else MAX_PARTS_NARROW)
        parts = triton.cdiv(tiles, each) if rows else 0
        dw = weight.new_empty(parts, width, dtype=torch.float32)
        if rows:
            rms_norm_backward[(parts,)](
                x, weight, rstd, dy.reshape(rows, width).contiguous(), dx, dw, rows, x.stride(0), each,
                WIDTH=width, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
            )  # fmt: skip
        return dx.view(dy.shape), dw.sum(0).to(weight.dtype), None


SWIGLU_TILE = 2048  # numbers of each half per program
SWIGLU_WIDTH = 1024  # maximum columns per program


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward(
    x, weights, y, rows, stride, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y (rows, WIDTH) = silu(gate) up of x, whose rows have `stride`, times the rows' weights."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + column + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        value *= tl.load(weights + row, mask=row < rows, other=0.0)
    tl.store(y + row * WIDTH + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward(
    x, weights, dy, dx, dw, rows, stride, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx (rows, 2 WIDTH): w dy up s (1 + gate (1 - s)) of the gate, with its sigmoid s and the row's weight w, and
    w dy gate s of up. A column of dw (rows, blocks of columns) has the sums of dy gate s up in its block."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + column + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    if WEIGHTED:
        of_weights = tl.sum(grad * gate * s * up, 1)[:, None]
        tl.store(dw + row * tl.num_programs(1) + tl.program_id(1), of_weights, mask=row < rows)
        grad *= tl.load(weights + row, mask=row < rows, other=0.0)
    of_gate, of_up = grad * up * s * (1.0 + gate * (1.0 - s)), grad * gate * s
    place = row * (2 * WIDTH) + column
    tl.store(dx + place, of_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + place + WIDTH, of_up.to(dx.dtype.element_ty), mask=inside)


class SwiGLUTile(NamedTuple):
    """Rows and columns of each half per program, powers of 2."""

    rows: int
    block: int

    @classmethod
    def of(cls, width: int) -> SwiGLUTile:
        block = min(SWIGLU_WIDTH, triton.next_power_of_2(width))
        return cls(SWIGLU_TILE // block, block)

    def grid(self, rows: int, width: int) -> tuple[int, int]:
        return triton.cdiv(rows, self.rows), triton.cdiv(width, self.block)


class SwiGLU(torch.autograd.Function):
    """Keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        ctx.save_for_backward(flat, weights)
        rows, width = len(flat), flat.size(1) // 2
        y, tile = flat.new_empty(*x.shape[:-1], width), SwiGLUTile.of(width)
        if y.numel():
            swiglu_forward[tile.grid(rows, width)](
                flat, flat if weights is None else weights.contiguous(), y, rows, flat.stride(0),
                WEIGHTED=weights is not None, WIDTH=width, ROWS=tile.rows, BLOCK=tile.block,
            )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weights = ctx.saved_tensors
        rows, width = len(x), x.size(1) // 2
        dx, tile = x.new_empty(*dy.shape[:-1], 2 * width), SwiGLUTile.of(width)
        dw = None if weights is None else weights.new_zeros(rows, triton.cdiv(width, tile.block))
        if dx.numel():
            swiglu_backward[tile.grid(rows, width)](
                x, x if weights is None else weights.contiguous(), dy.contiguous(), dx, x if dw is None else dw, rows,
                x.stride(0), WEIGHTED=weights is not None, WIDTH=width, ROWS=tile.rows, BLOCK=tile.block,
            )  # fmt: skip
        return dx, None if dw is None else dw.sum(1).view(weights.shape)


ROPE_PAIRS = 2048  # pairs per program
MAX_HEADS = 16  # heads of a token per program


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    x, cos, sin, y, tokens, token_stride, group_stride, head_stride, BACK: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y (tokens, GROUPS * HEADS, 2 HALF) = x rotated, or rotated BACK. x has the three strides; cos and sin (tokens,
    HALF) and y are contiguous."""
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK)
    here = (token < tokens)[:, None] & (column < HALF)[None, :]
    inside = here[:, None, :] & (head < GROUPS * HEADS)[None, :, None]
    of_head = (head // HEADS).to(tl.int64) * group_stride + (head % HEADS).to(tl.int64) * head_stride
    place = (token * token_stride)[:, None, None] + of_head[None, :, None] + column[None, None, :]
    # Loads of the heads are issued before the angles, which go through shared memory and a barrier.
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token[:, None] * HALF + column[None, :]
    c = tl.load(cos + angle, mask=here, other=0.0)
    s = tl.load(sin + angle, mask=here, other=0.0)
    s = -s if BACK else s
    c, s = c[:, None, :], s[:, None, :]
    row = token[:, None, None] * (GROUPS * HEADS) + head[None, :, None]
    place = row * (2 * HALF) + column[None, None, :]
    tl.store(y + place, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + place + HALF, (second * c + first * s).to(y.dtype.element_ty), mask=inside)


class RopeTile(NamedTuple):
    """Tokens, heads and columns per program, powers of 2."""

    tokens: int
    heads: int
    block: int

    @classmethod
    def of(cls, heads: int, half: int) -> RopeTile:
        block = triton.next_power_of_2(half)
        at_once = min(MAX_HEADS, triton.next_power_of_2(heads))
        return cls(max(1, ROPE_PAIRS // (at_once * block)), at_once, block)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """x (tokens, [groups,] heads, head_dim); cos and sin (tokens, head_dim / 2), both contiguous."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x if x.dim() == 4 else x.unsqueeze(1)
    tokens, groups, heads, head_dim = x.shape
    if y.numel():
        tile = RopeTile.of(groups * heads, head_dim // 2)
        rotate[(triton.cdiv(tokens, tile.tokens), triton.cdiv(groups * heads, tile.heads))](
            x, cos, sin, y, tokens, *x.stride()[:3], BACK=back, GROUPS=groups, HEADS=heads, HALF=head_dim // 2,
            BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads, BLOCK=tile.block,
            enable_fp_fusion=False,  # exact mode: training rotates queries and keys by other machine code than rollout
        )  # fmt: skip
    return y


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grad, *ctx.saved_tensors, back=True), None, None
