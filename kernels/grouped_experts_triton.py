"""Gradients of experts' weights in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE, ROWS = 128, 64  # numbers of a gradient along each axis, and rows at a time


@triton.jit
def expert_gradients(
    grad, a, ends, sums, stride, M: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """sums[e] (M, K), at distances of `stride`, += grad^T a of the rows of expert e of grad (R, M) and a (R, K)."""
    expert = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(K, TILE)
    m = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    k = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if first < end:
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in range(first, end, ROWS):
            row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            of_grad = tl.load(grad + row * M + m[None, :], mask=(row < end) & (m[None, :] < M), other=0.0)
            of_a = tl.load(a + row * K + k[None, :], mask=(row < end) & (k[None, :] < K), other=0.0)
            total = tl.dot(tl.trans(of_grad), of_a, total, input_precision="ieee")
        places = sums + expert * stride + m[:, None] * K + k[None, :]
        inside = (m[:, None] < M) & (k[None, :] < K)
        tl.store(places, tl.load(places, mask=inside, other=0.0) + total, mask=inside)


def add_expert_gradients(sums: Tensor, grad: Tensor, a: Tensor, ends: Tensor) -> None:
    """sums (E, M, K) fp32 += grad^T a of each expert's rows, whose ends are int32 (E,)."""
    experts, m, k = sums.shape
    tiles = triton.cdiv(m, TILE) * triton.cdiv(k, TILE)
    if len(a):
        expert_gradients[(tiles, experts)](
            grad.contiguous(), a.contiguous(), ends, sums, sums.stride(0), M=m, K=k, TILE=TILE, ROWS=ROWS, num_warps=8
        )
