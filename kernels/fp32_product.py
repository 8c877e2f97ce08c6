"""Products of bf16 matrices in fp32, without gradients, and gradients of weights that are sums of them.

Megatron adds the weight gradients of its linear layers to an fp32 sum over micro-batches by an extension of Apex;
`FusedWeightGradient` takes its place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SLICE = 2048  # rows of a temporary product


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of (n, k) and (k, m): fp32, or fp64 if the operands are fp64.

    Rounded to the operands' dtype on CUDA with torch older than 2.8. A CPU converts the operands first.
    """
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32) if _has_fp32_output() else a @ b
    return a.float() @ b.float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (fp32, or fp64 if the operands are) += a @ b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda" and _has_fp32_addmm():
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        for rows in slices(len(a), SLICE):
            total[rows] += product(a[rows], b)


def slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` over `count` rows or columns."""
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


@functools.cache
def _has_fp32_output() -> bool:
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False


@functools.cache
def _has_fp32_addmm() -> bool:
    """Whether addmm accepts a sum in fp32; torch 2.8 and some later versions require the operands' dtype."""
    one, total = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())


class FusedWeightGradient:
    """A function by its name in Apex's module `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """main_grad (m, k) += grad^T @ x, of (n, m) and (n, k)."""
        add_product(main_grad, grad.t(), x)


def sums_in_fp32(weight: Tensor) -> bool:
    """Whether the gradient of `weight` is added to `weight.main_grad` in the backward pass, as megatron's layers do."""
    return getattr(weight, "sums_in_fp32", False)


def added(weight: Any) -> Tensor:
    """Return what autograd gets for a weight whose gradient has been added to `weight.main_grad`."""
    weight.grad_added_to_main_grad = True
    # Megatron's hook ignores it, but with tied embeddings it adds the sum of this and the embedding's gradient.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
