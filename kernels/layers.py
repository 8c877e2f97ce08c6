"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020, arXiv:2002.05202, eq. 6), and the rotary
position embedding (Su et al. 2021, arXiv:2104.09864) in the half-rotation form of Llama and Megatron.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

from hpcrl.kernels.dispatch import use_triton

WIDEST = 8192  # a row and what is summed over rows are held in registers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    x: (..., width) fp32, bf16 or fp16; weight: (width,). Computed in fp32, given in the dtype of `x`.
    Moves x in, the result out; backward x and the gradient in, a gradient out: about 4 operations a number. Rows of `x`
    that lie at more than one distance are copied first.
    """
    if use_triton("rms_norm", x, unless=_too_wide(x)):
        from hpcrl.kernels.rms_norm_triton import RMSNorm

        return RMSNorm.apply(x, weight, eps)
    return functional.rms_norm(x, (x.size(-1),), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place, in their dtype, and gives `rms_norm` of the sum as it is kept there.

    residual: shaped as `x`. Without a gradient: training keeps its residuals in megatron. Moves x and residual in, the
    sum and its norm out.
    """
    gap = "" if residual.is_contiguous() else "a residual with gaps"
    if use_triton("add_rms_norm", x, unless=_too_wide(x) or gap):
        from hpcrl.kernels.rms_norm_triton import add_rms_norm as fused

        return fused(x, residual, weight, eps)
    residual += x
    return functional.rms_norm(residual, (residual.size(-1),), weight, eps)


def _too_wide(x: Tensor) -> str:
    return f"rows of {x.size(-1)} are wider than {WIDEST}" if x.size(-1) > WIDEST else ""


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of `x` (..., 2 m), gate and up beside one another: (..., m), in the dtype of `x`.

    x: fp32, bf16 or fp16. Computed in fp32 and rounded once on a GPU, after each of the two steps elsewhere.
    Moves x in and the result, half as large, out: about 6 operations for each number of it. For the backward pass the
    kernel keeps x alone; it moves x and the gradient in, that of x out: about 12 operations. ValueError for odd rows.
    """
    if x.size(-1) % 2:
        raise ValueError(f"rows of {x.size(-1)} are not two halves; give gate and up of one width")
    if use_triton("swiglu", x):
        from hpcrl.kernels.swiglu_triton import SwiGLU

        return SwiGLU.apply(x)
    gate, up = x.chunk(2, dim=-1)
    gated = silu(gate)
    return gated * up if x.requires_grad else gated.mul_(up)


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
