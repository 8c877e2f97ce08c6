"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020, arXiv:2002.05202, eq. 6), and the rotary
position embedding (Su et al. 2021, arXiv:2104.09864) in the half-rotation form of Llama and Megatron."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

from hpcrl.kernels.dispatch import use_triton

MAX_WIDTH = 8192  # a row, and sums over rows, are held in registers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    Computed in fp32, returned in the dtype of `x`. Moves x in, the result out; backward x and the gradient in, a
    gradient out: about 4 operations a number. If rows of `x` do not have one stride, they are copied first.

    Args:
        x: (..., width) fp32, bf16 or fp16.
        weight: (width,), as `x` or fp32.
    """
    if use_triton("rms_norm", x, unless=_norm_reason(x)):
        from hpcrl.kernels.layers_triton import RMSNorm

        return RMSNorm.apply(x, weight, eps)
    return _torch_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place, in their dtype, and return `rms_norm` of the stored sum.

    No gradient: training keeps its residuals in megatron. Moves x and residual in, the sum and its norm out.

    Args:
        residual: shaped as `x`.
    """
    gap = "" if residual.is_contiguous() else "a non-contiguous residual"
    if use_triton("add_rms_norm", x, unless=_norm_reason(x) or gap):
        from hpcrl.kernels.layers_triton import add_rms_norm as fused

        return fused(x, residual, weight, eps)
    residual += x
    return _torch_norm(residual, weight, eps)


def _torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _norm(x, weight, eps)[0]
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.to(weight.dtype), (x.size(-1),), weight, eps).to(x.dtype)
    return functional.rms_norm(x, (x.size(-1),), weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and 1 / sqrt(mean(x^2) + eps), (..., 1)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / x.size(-1)).rsqrt_()
    return (x * scale).mul_(weight), scale


@functools.cache
def _constant(number: float) -> Tensor:
    return torch.tensor(number)


class _RMSNorm(torch.autograd.Function):
    """Reads and writes memory half as often as torch's own on the CPU, which is a sequence of operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """scale (g - x scale^2 mean(g x)) with g = grad weight, and the sum of grad x scale over rows.

        One tensor of the size of x exists besides those given.
        """
        x, weight, scale = ctx.saved_tensors
        width = x.size(-1)
        product = (grad * x).reshape(-1, width)
        grad_weight = torch.mv(product.t(), scale.flatten())
        shrunk = torch.mv(product, weight).view(scale.shape).mul_(scale.square()).div_(-width)
        grad_x = torch.mul(grad, weight, out=product.view(grad.shape)).addcmul_(x, shrunk).mul_(scale)
        return grad_x, grad_weight, None


def _norm_reason(x: Tensor) -> str:
    return f"rows of {x.size(-1)} are wider than {MAX_WIDTH}" if x.size(-1) > MAX_WIDTH else ""


def swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of `x` (..., 2 m) = [gate, up], times `weights` (...) fp32: (..., m), in the dtype of `x`.

    Computed in fp32 and rounded once on a GPU, after each of the steps elsewhere. Moves x in and the result, half as
    large, out: about 6 operations per result. For the backward pass only the inputs are kept; it moves x and the
    gradient in, that of x out: about 12 operations. Raises ValueError for odd rows.

    Args:
        x: fp32, bf16 or fp16.
    """
    if x.size(-1) % 2:
        raise ValueError(f"rows of {x.size(-1)} are not two halves; gate and up must have one width")
    if use_triton("swiglu", x):
        from hpcrl.kernels.layers_triton import SwiGLU

        return SwiGLU.apply(x, weights)
    return _SwiGLU.apply(x, weights) if torch.is_grad_enabled() else _swiglu(x, weights)


def _swiglu(x: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    product = silu(gate).mul_(up)
    return product if weights is None else product.mul_(weights.unsqueeze(-1))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        return _swiglu(x, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weights = ctx.saved_tensors
        grad_x, grad_weights = torch.empty_like(x, memory_format=torch.contiguous_format), None
        (gate, up), (of_gate, of_up) = x.chunk(2, dim=-1), grad_x.chunk(2, dim=-1)
        gated, of_gated = silu(gate), grad * up
        torch.mul(grad, gated, out=of_up)
        if weights is not None:
            grad_weights = torch.linalg.vecdot(of_gated, gated).to(weights.dtype)
            of_gated.mul_(weights.unsqueeze(-1))
            of_up.mul_(weights.unsqueeze(-1))
        torch.ops.aten.silu_backward.grad_input(of_gated, gate, grad_input=of_gate)
        return grad_x, grad_weights


MOST_DIMENSIONS = 4  # maximum dimensions of the kernel


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` (tokens, ..., heads, head_dim): element i pairs with element i + head_dim / 2, eq. 34 of the paper in
    another order of the elements. Narrower angles rotate the first numbers of a head, which are as wide as two of
    them.

    Computed in fp32, returned contiguous in the dtype of `x`; heads of `x` may be strided, as in a matrix of queries,
    keys and values. The gradient of a rotation is the reverse rotation. Moves x in and the result out, and 4 head_dim
    bytes of a token's cos and sin in: 3 operations a number, and the same in the backward pass. Raises ValueError for
    an odd head_dim.

    Args:
        cos, sin: (tokens, ..., head_dim / 2) fp32: one row per token, the same for all heads; dimensions in between are
            1.
    """
    if x.size(-1) % 2:
        raise ValueError(f"head_dim={x.size(-1)} is odd; rotary embeddings need an even width")
    if (width := 2 * cos.size(-1)) < x.size(-1):
        return torch.cat((apply_rope(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    if use_triton("rope", x, unless=_rope_reason(x, cos)):
        from hpcrl.kernels.layers_triton import Rope

        return Rope.apply(x, cos, sin)
    return _Rope.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def _rope_reason(x: Tensor, cos: Tensor) -> str:
    if not 3 <= x.dim() <= MOST_DIMENSIONS:
        return f"heads in {x.dim()} dimensions"
    if cos.numel() != x.size(0) * x.size(-1) // 2:
        return "angles are not one row per token"
    return ""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rope(torch.autograd.Function):
    """Records 5 operations where autograd would record 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None
