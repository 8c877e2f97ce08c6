"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and behind the sum with a residual."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

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
