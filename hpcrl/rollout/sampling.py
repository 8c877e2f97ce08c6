"""Drawing tokens with random numbers that depend on what is drawn, never on batching, order or layout.

Philox4x32-10 is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hpcrl.rollout.protocol import SamplingParams

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

_BLOCK = 64  # ids; a sum or a maximum over the vocabulary is taken in blocks, then inside the one that is wanted


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words (..., 4) uint32 for `counter` (..., 4) and `key` (..., 2), both uint32."""
    # Words 0 and 2 are multiplied, words 1 and 3 mixed in: two lanes, side by side.
    lanes = np.moveaxis(counter.astype(np.uint64), -1, 0)
    multiplied, mixed = lanes[0::2], lanes[1::2]
    shape = (2, *(1,) * (lanes.ndim - 1))
    multipliers, weyl = _MULTIPLIERS.reshape(shape), _WEYL.reshape(shape)
    round_key = np.moveaxis(key.astype(np.uint64), -1, 0)
    for _ in range(_ROUNDS):
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
    """Draws one token per row of `logits` (n, padded vocabulary), any float dtype, with `uniform` fp64 (n,).

    The token is the first id whose cumulative probability exceeds u, summed in fp64 in id order over the tokens that
    top-k and then top-p keep. Its log-prob is the fp32 log-softmax after temperature and before that filter. At
    temperature 0 it is the lowest id of the largest logit, with its log-prob under temperature 1. Ids from `vocab_size`
    on only pad the weights and have no probability; their logits are overwritten.
    """
    logits[:, vocab_size:] = -torch.inf
    scores = logits.float()
    if sampling.temperature not in (0, 1):
        scores = scores / sampling.temperature
    if scores.size(-1) % _BLOCK:
        scores = pad(scores, (0, -scores.size(-1) % _BLOCK), value=-torch.inf)
    probs = scores.softmax(-1)
    if sampling.temperature == 0:
        block = _blocks(scores).amax(-1).argmax(-1, keepdim=True)
        token_ids = block * _BLOCK + _take(_blocks(scores), block).argmax(-1, keepdim=True)
    else:
        token_ids = _first_above(_keep(probs, sampling), torch.from_numpy(uniform).to(probs.device).unsqueeze(-1))
    log_probs = probs.gather(-1, token_ids).log()
    if not bool(log_probs.isfinite().all()):
        raise FloatingPointError("the policy's logits are not finite: its weights diverged; resume from before")
    return Sampled(token_ids.squeeze(-1), log_probs.squeeze(-1))


def _first_above(weights: Tensor, share: Tensor) -> Tensor:
    """The first id (n, 1) at which the sum of `weights` fp32 (n, ids) exceeds its `share` fp64 (n, 1)."""
    blocks = _blocks(weights)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    # A share of the total renormalises after the filter, and after rounding.
    bounds = share * ends[:, -1:]
    # Both searches may run over the end: the first with NaN, the second by rounding.
    block = torch.searchsorted(ends, bounds, right=True).clamp_(max=ends.size(-1) - 1)
    inside = _take(blocks, block).double().cumsum(-1) + (ends - sums).gather(-1, block)
    return block * _BLOCK + torch.searchsorted(inside, bounds, right=True).clamp_(max=_BLOCK - 1)


def _blocks(x: Tensor) -> Tensor:
    """(n, ids) -> (n, blocks, _BLOCK)."""
    return x.view(len(x), -1, _BLOCK)


def _take(blocks: Tensor, block: Tensor) -> Tensor:
    """Of each row of `blocks` (n, blocks, _BLOCK) that of number `block` int64 (n, 1): (n, _BLOCK)."""
    return blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(-1)]


def _keep(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """`probs` (n, ids) with 0 for what top-k and top-p drop; of equal probabilities lower ids are kept first."""
    top_k = probs.size(-1) if sampling.top_k == -1 else sampling.top_k
    if top_k >= probs.size(-1) and sampling.top_p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    before = ordered.double().cumsum(-1) - ordered.double()
    # Nucleus: the fewest likeliest tokens that together reach top_p, so a token stays while those before it do not.
    ordered[before >= sampling.top_p * ordered.double().sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)
