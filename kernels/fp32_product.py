"""Products of bf16 matrices that keep the fp32 of their accumulators: of logits, differences are log-probabilities."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of (n, k) and (k, m), without gradients: fp32, or fp64 where the operands are fp64.

    Rounded to the dtype of the operands on CUDA where torch is older than 2.8. A CPU converts the operands first.
    """
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32) if _gives_fp32() else a @ b
    return a.float() @ b.float()


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight^T, (n, V) of (n, k) and (V, k), without gradients: on CUDA in fp32.

    On a CPU in the dtype of the operands, because their conversion made decoding in bf16 11 to 33% slower.
    """
    return product(hidden, weight.T) if hidden.device.type == "cuda" else hidden @ weight.T


@functools.cache
def _gives_fp32() -> bool:
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False
