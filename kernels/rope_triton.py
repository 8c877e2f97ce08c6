"""Rotary position embedding in Triton: a program turns some heads of some tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen

PAIRS = 2048  # that a program turns
MOST_HEADS = 16  # of a token in one program


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    x, cos, sin, y, tokens, token_stride, group_stride, head_stride, BACK: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y (tokens, GROUPS * HEADS, 2 HALF) = x turned, or turned BACK; x has the three strides, cos and sin (tokens,
    HALF) and y none."""
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK)
    here = (token < tokens)[:, None] & (column < HALF)[None, :]
    inside = here[:, None, :] & (head < GROUPS * HEADS)[None, :, None]
    of_head = (head // HEADS).to(tl.int64) * group_stride + (head % HEADS).to(tl.int64) * head_stride
    place = (token * token_stride)[:, None, None] + of_head[None, :, None] + column[None, None, :]
    # Angles go through shared memory, which takes a barrier: the heads are under way by then.
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


class Tile(NamedTuple):
    """Tokens and heads that a program turns, and columns: powers of 2."""

    tokens: int
    heads: int
    block: int

    @classmethod
    def of(cls, heads: int, half: int) -> Tile:
        block = triton.next_power_of_2(half)
        at_once = min(MOST_HEADS, triton.next_power_of_2(heads))
        return cls(max(1, PAIRS // (at_once * block)), at_once, block)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """x (tokens, [groups,] heads, head_dim), cos and sin (tokens, head_dim / 2), both without gaps."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x if x.dim() == 4 else x.unsqueeze(1)
    tokens, groups, heads, head_dim = x.shape
    if y.numel():
        tile = Tile.of(groups * heads, head_dim // 2)
        rotate[(triton.cdiv(tokens, tile.tokens), triton.cdiv(groups * heads, tile.heads))](
            x, cos, sin, y, tokens, *x.stride()[:3], BACK=back, GROUPS=groups, HEADS=heads, HALF=head_dim // 2,
            BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads, BLOCK=tile.block,
        )  # fmt: skip
    return y


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad, *ctx.saved_tensors, back=True), None, None


def specimens() -> list[Specimen]:
    """What is compiled to see registers and spills: the queries and keys of 8 groups as they lie in a mixed matrix, the
    keys alone, and narrow heads that are no power of 2."""
    found = []
    for groups, heads, head_dim in ((8, 5, 128), (1, 8, 128), (1, 16, 96)):
        tile = Tile.of(groups * heads, head_dim // 2)
        found.append(
            Specimen(
                f"rope {groups} x {heads} heads of {head_dim}",
                rotate,
                {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "y": "*bf16", "tokens": "i32"}
                | dict.fromkeys(("token_stride", "group_stride", "head_stride"), "i32"),
                {"BACK": False, "GROUPS": groups, "HEADS": heads, "HALF": head_dim // 2}
                | {"BLOCK_TOKENS": tile.tokens, "BLOCK_HEADS": tile.heads, "BLOCK": tile.block},
            )
        )
    return found
