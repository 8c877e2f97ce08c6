"""Rotary position embedding of heads (Su et al. 2021, arXiv:2104.09864), half-rotation form of Llama and Megatron."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton

MOST_DIMENSIONS = 4  # that the kernel has a stride for


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` (tokens, ..., heads, head_dim): element i pairs with element i + head_dim / 2, eq. 34 of the paper in
    another order of the elements.

    `cos` and `sin` (tokens, ..., head_dim / 2) fp32: one row per token, the same for all heads, so that dimensions
    between are 1. Computed in fp32, given in the dtype of `x`, without gaps; heads of `x` may lie apart, as they do in
    a matrix of queries, keys and values. The gradient of a rotation is the rotation back.
    Moves x in and the result out, and 4 head_dim bytes of a token's cos and sin in: 3 operations a number. In the
    backward pass the same once more. ValueError where head_dim is odd.
    """
    if x.size(-1) % 2:
        raise ValueError(
            f"a rotary embedding turns pairs, head_dim={x.size(-1)} is odd; give it an even part of a head"
        )
    if use_triton("rope", x, unless=_not_for_kernel(x, cos)):
        from hpcrl.kernels.rope_triton import Rope

        return Rope.apply(x, cos, sin)
    return _Rope.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def _not_for_kernel(x: Tensor, cos: Tensor) -> str:
    if not 3 <= x.dim() <= MOST_DIMENSIONS:
        return f"heads in {x.dim()} dimensions"
    if cos.numel() != x.size(0) * x.size(-1) // 2:
        return "angles of more than tokens"
    return ""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rope(torch.autograd.Function):
    """5 operations where autograd would record 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None
