"""Sampling of one token per row of logits, with one uniform number each.

The numbers are Philox4x32-10's (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3):
those of `hpcrl.rollout.sampling.uniforms`, bit for bit.

The token is the first id whose cumulative probability, summed in id order, exceeds the uniform number: in fp64, of
probabilities and, in torch, of fp32 sums of 64 of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hpcrl.kernels.dispatch import use_triton

# Of Philox4x32-10.
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_BLOCK = 64  # ids; sums and maxima over the vocabulary are taken in blocks, then inside the selected one


class Partials(NamedTuple):
    """Of parts of each row, in id order: the largest score fp32 (n, parts), and the sum of exp(score - that) fp64 (n,
    parts). The score is the logit after temperature. A part without finite scores has -inf and 0."""

    maxima: Tensor
    sums: Tensor

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the same of whole rows: (n,) fp32 and (n,) fp64."""
        maximum = self.maxima.amax(-1)
        base = maximum.masked_fill(maximum == -torch.inf, 0)
        return maximum, (self.sums * (self.maxima - base.unsqueeze(-1)).double().exp()).sum(-1)


def sample(
    logits: Tensor,
    uniform: Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    partials: Partials | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `logits` (n, padded vocabulary), fp32, bf16 or fp16, with `uniform` fp64 (n,).

    Returns the ids int64 (n,) and their log-probs fp32 (n,). The token is the first id whose cumulative probability
    exceeds u, summed in fp64 in id order over the tokens that top-k (-1: all) and then top-p (1: all) keep; among equal
    probabilities the lowest ids are kept first. Its log-prob is the fp32 log-softmax after temperature and before that
    filter. At temperature 0 it is the lowest id of the largest logit, with its log-prob under temperature 1. Ids from
    `vocab_size` on have no token and no probability; their logits may be overwritten. If a logit is NaN or inf, or
    all are -inf, the log-prob is not finite; this function does not synchronise to check it.

    `partials` are those of `partials(logits, vocab_size, temperature)`, if they are known already.

    Moves the logits in once, and 4096 of each row once more, most likely from the L2 cache; a filter reads its row
    again for every two bits of a logit, from there too. About 10 operations a logit, one of them an exponential. Triton
    and torch may draw different tokens if u lies within 1e-6 of a boundary, because their fp32 exponentials differ, and
    may keep different ones at top_p.
    """
    if use_triton("sampling", logits):
        from hpcrl.kernels.sampling_triton import sample as fused

        return fused(logits, uniform, vocab_size, temperature, top_k, top_p, partials)
    logits[:, vocab_size:] = -torch.inf
    scores = logits.float()
    if temperature not in (0, 1):
        scores = scores / temperature
    if scores.size(-1) % _BLOCK:
        scores = pad(scores, (0, -scores.size(-1) % _BLOCK), value=-torch.inf)
    probs = scores.softmax(-1)
    if temperature == 0:
        block = _blocks(scores).amax(-1).argmax(-1, keepdim=True)
        token_ids = block * _BLOCK + _take(_blocks(scores), block).argmax(-1, keepdim=True)
    else:
        token_ids = _first_above(_keep(probs, top_k, top_p), uniform.unsqueeze(-1))
    return token_ids.squeeze(-1), probs.gather(-1, token_ids).log().squeeze(-1)


def partials(logits: Tensor, vocab_size: int, temperature: float = 1.0) -> Partials:
    """Return the sums that ranks with a part of the vocabulary exchange; arguments as those of `sample`."""
    if use_triton("sampling", logits):
        from hpcrl.kernels.sampling_triton import partials as fused

        return fused(logits, vocab_size, temperature)
    scores = logits[:, :vocab_size].float()
    if temperature not in (0, 1):
        scores = scores / temperature
    maxima = pad(scores, (0, 1), value=-torch.inf).amax(-1, keepdim=True)  # for empty rows, too
    weights = (scores - maxima.masked_fill(maxima == -torch.inf, 0)).exp()
    return Partials(maxima, weights.sum(-1, keepdim=True, dtype=torch.float64))


def _first_above(weights: Tensor, share: Tensor) -> Tensor:
    """Return the first id (n, 1) at which the sum of `weights` fp32 (n, ids) exceeds its `share` fp64 (n, 1)."""
    blocks = _blocks(weights)
    sums = blocks.sum(-1).double()  # fp64 sums of all weights would take as long as the softmax
    ends = sums.cumsum(-1)
    # The total, because filter and rounding change it.
    bounds = share * ends[:, -1:]
    block = torch.searchsorted(ends, bounds, right=True).clamp_(max=ends.size(-1) - 1)  # NaN exceeds the end
    inside = _take(blocks, block).double().cumsum(-1)
    # The sums of a block in fp32 and in fp64 differ: the rest of the share is kept below the latter.
    rest = bounds - (ends - sums).gather(-1, block)
    rest = torch.minimum(rest.clamp_(min=0), inside[:, -1:] * (1 - 2**-53))
    return block * _BLOCK + torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)


def _blocks(x: Tensor) -> Tensor:
    """(n, ids) -> (n, blocks, _BLOCK)."""
    return x.view(len(x), -1, _BLOCK)


def _take(blocks: Tensor, block: Tensor) -> Tensor:
    """Return block number `block` int64 (n, 1) of each row of `blocks` (n, blocks, _BLOCK): (n, _BLOCK)."""
    return blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(-1)]


def _keep(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return `probs` (n, ids) with 0 for the ids that top-k and top-p drop; among equal probabilities lower ids are
    kept first."""
    top_k = probs.size(-1) if top_k == -1 else top_k
    if top_k >= probs.size(-1) and top_p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    before = ordered.double().cumsum(-1) - ordered.double()
    # Nucleus: the smallest set of most likely tokens that reaches top_p: keep a token if those before it do not.
    ordered[before >= top_p * ordered.double().sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)


def uniforms(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """Return one number in (0, 1), fp64 (n,), per token to draw from logits `like`.

    `keys` (2, n), `positions` (n,), `sample_indices` (n,) and `step` (1,) are int32 with the bits of uint32, all
    contiguous. Computes 10 rounds of two products and writes 8 bytes per number.
    """
    if use_triton("philox", like):
        from hpcrl.kernels.sampling_triton import uniforms as fused

        return fused(keys, positions, sample_indices, step)
    return uniforms_reference(keys, positions, sample_indices, step)


def uniforms_reference(keys: Tensor, positions: Tensor, sample_indices: Tensor, step: Tensor) -> Tensor:
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
