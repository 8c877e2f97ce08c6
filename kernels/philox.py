"""Uniform random numbers by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3) on the device: those of `hpcrl.rollout.sampling.uniforms`, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def uniforms(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """Return one number in (0, 1), fp64 (n,), per token to draw from logits `like`.

    `keys` (2, n), `positions` (n,), `sample_indices` (n,) and `step` (1,) are int32 with the bits of uint32, all
    contiguous. Computes 10 rounds of two products and writes 8 bytes per number.
    """
    if use_triton("philox", like):
        from hpcrl.kernels.philox_triton import uniforms as fused

        return fused(keys, positions, sample_indices, step)
    return reference(keys, positions, sample_indices, step)


def reference(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor) -> Tensor:
    # Words 0 and 2 are multiplied, words 1 and 3 mixed in: two lanes at once.
    zero = torch.zeros_like(positions)
    words = torch.stack([positions, step.expand_as(zero), sample_indices, zero]).long() & _LOW
    multiplied, mixed = words.view(2, 2, -1)
    # Filled on the device: torch.tensor would copy.
    multipliers, weyl = (_pair(*pair, like=words) for pair in (MULTIPLIERS, WEYL))
    round_key = keys.long() & _LOW
    for _ in range(ROUNDS):
        # Products may exceed int64 and wrap, which leaves their 64 bits as they are.
        product = (multiplied * multipliers).flip(0)
        multiplied, mixed = ((product >> 32) & _LOW) ^ mixed ^ round_key, product & _LOW
        round_key = (round_key + weyl) & _LOW
    return (multiplied[0].double() + 0.5) / 2.0**32


def _pair(first: int, second: int, like: Tensor) -> Tensor:
    """(2, 1), int64."""
    pair = like.new_full((2, 1), first)
    pair[1] = second
    return pair
