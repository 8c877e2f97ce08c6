"""Philox4x32-10 in Triton, one row per lane."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from hpcrl.kernels.philox import ROUNDS as _ROUNDS

BLOCK = 128
ROUNDS = tl.constexpr(_ROUNDS)


@triton.jit
def draw_uniforms(keys, positions, sample_indices, step, numbers, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    key_0 = tl.load(keys + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + n + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    position = tl.load(positions + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    sample = tl.load(sample_indices + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    zero = tl.zeros((BLOCK,), tl.uint32)
    trainer_step = zero + tl.load(step).to(tl.uint32, bitcast=True)
    word, _, _, _ = philox_impl(position, sample, trainer_step, zero, key_0, key_1, ROUNDS)
    tl.store(numbers + place, (word.to(tl.float64) + 0.5) * (2.0**-32), mask=inside)


def uniforms(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor) -> Tensor:
    n = len(positions)
    numbers = positions.new_empty(n, dtype=torch.float64)
    if n:
        draw_uniforms[(triton.cdiv(n, BLOCK),)](keys, positions, sample_indices, step, numbers, n, BLOCK)
    return numbers
