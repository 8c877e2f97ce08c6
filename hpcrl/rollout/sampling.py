"""Drawing tokens with random numbers that depend on what is drawn, never on batching, order or layout.

Philox4x32-10 is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels import sampling as kernels
from hpcrl.rollout.protocol import SamplingParams

_MULTIPLIERS = np.array(kernels.MULTIPLIERS, np.uint64)
_WEYL = np.array(kernels.WEYL, np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words (..., 4) uint32 for `counter` (..., 4) and `key` (..., 2), both uint32."""
    # Words 0 and 2 are multiplied, words 1 and 3 mixed in: two lanes, side by side.
    lanes = np.moveaxis(counter.astype(np.uint64), -1, 0)
    multiplied, mixed = lanes[0::2], lanes[1::2]
    shape = (2, *(1,) * (lanes.ndim - 1))
    multipliers, weyl = _MULTIPLIERS.reshape(shape), _WEYL.reshape(shape)
    round_key = np.moveaxis(key.astype(np.uint64), -1, 0)
    for _ in range(kernels.ROUNDS):
        product = multiplied * multipliers
        multiplied, mixed = (product[::-1] >> _HALF) ^ mixed ^ round_key, product[::-1] & _LOW
        round_key = (round_key + weyl) & _LOW
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]], axis=-1).astype(np.uint32)


def request_key(seed: int, uid: str) -> np.ndarray:
    """The Philox key (2,) uint32 of a prompt: blake2b-8 of seed (8 bytes, little-endian, signed) and uid (UTF-8).

    The digest's first four bytes are word 0, the others word 1, both little-endian.
    """
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + uid.encode("utf-8"), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def uniforms(keys: np.ndarray, positions: np.ndarray, sample_indices: np.ndarray, step: int) -> np.ndarray:
    """One number in (0, 1), fp64 (n,), per token to draw.

    `keys` (n, 2) uint32 from `request_key`; `positions` (n,) = index of the token in its response; `sample_indices`
    (n,); `step` of the trainer. The counter is (position, sample index, step, 0), u = (first word + 0.5) / 2^32.
    """
    counter = np.zeros((len(positions), 4), dtype=np.uint32)
    counter[:, 0] = positions
    counter[:, 1] = sample_indices
    counter[:, 2] = step
    return (philox4x32(counter, keys)[:, 0].astype(np.float64) + 0.5) / 2.0**32


class Sampled(NamedTuple):
    """`token_ids` int64 (n,) and `log_probs` fp32 (n,) of those tokens."""

    token_ids: Tensor
    log_probs: Tensor


def sample(logits: Tensor, uniform: np.ndarray, vocab_size: int, sampling: SamplingParams) -> Sampled:
    """Draws one token per row of `logits` (n, padded vocabulary), any float dtype, with `uniform` fp64 (n,), as
    `hpcrl.kernels.sampling` does. FloatingPointError where logits are not finite; -inf is no more than a token that is
    never drawn."""
    numbers = torch.from_numpy(uniform).to(logits.device)
    return checked(
        Sampled(*kernels.sample(logits, numbers, vocab_size, sampling.temperature, sampling.top_k, sampling.top_p))
    )


def checked(drawn: Sampled) -> Sampled:
    if not bool(drawn.log_probs.isfinite().all()):
        raise FloatingPointError("the policy's logits are not finite: its weights diverged; resume from before")
    return drawn
