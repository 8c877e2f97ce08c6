"""Drawing tokens with random numbers that depend on what is drawn, never on batching, order or layout.

Philox4x32-10 is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.protocol import SamplingParams

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words (..., 4) uint32 for `counter` (..., 4) and `key` (..., 2), both uint32."""
    word = [counter[..., i].astype(np.uint64) for i in range(4)]
    key_0, key_1 = key[..., 0].astype(np.uint64), key[..., 1].astype(np.uint64)
    for turn in range(_ROUNDS):
        product_0, product_1 = word[0] * _MULTIPLIERS[0], word[2] * _MULTIPLIERS[1]
        round_key_0 = (key_0 + np.uint64(turn * _WEYL[0])) & _LOW
        round_key_1 = (key_1 + np.uint64(turn * _WEYL[1])) & _LOW
        word = [
            (product_1 >> _HALF) ^ word[1] ^ round_key_0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ word[3] ^ round_key_1,
            product_0 & _LOW,
        ]
    return np.stack(word, axis=-1).astype(np.uint32)


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
    on only pad the weights and have no probability.
    """
    logits = logits[:, :vocab_size].float()
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        token_ids = logits.argmax(-1)
    else:
        log_probs = (logits / sampling.temperature).log_softmax(-1)
        cumulative = _keep(log_probs.exp(), sampling).double().cumsum(-1)
        # Scaling u by the total renormalises after the filter, and after rounding.
        bound = torch.from_numpy(uniform).to(cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
        token_ids = torch.searchsorted(cumulative, bound, right=True).squeeze(-1)
        if bool((token_ids >= logits.size(-1)).any()):  # what NaN leads to
            raise FloatingPointError("the policy's logits are not finite: its weights diverged; resume from before")
    return Sampled(token_ids, log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1))


def _keep(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """`probs` (n, vocabulary) with 0 for what top-k and top-p drop; of equal probabilities lower ids are kept first."""
    vocab_size = probs.size(-1)
    top_k = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    if top_k == vocab_size and sampling.top_p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    before = ordered.double().cumsum(-1) - ordered.double()
    # Nucleus: the fewest likeliest tokens that together reach top_p, so a token stays while those before it do not.
    ordered[before >= sampling.top_p * ordered.double().sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)
