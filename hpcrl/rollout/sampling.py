"""Keyed sampling of tokens: random numbers depend on (seed, uid, position, sample, step), not on batching, order or
layout; and `KeyedSampler`, in place of another engine's sampler.

Philox4x32-10 is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels import sampling as kernels
from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.sampling import MULTIPLIERS, ROUNDS, WEYL
from hpcrl.model.exact import TensorParallel, exact_log_probs
from hpcrl.rollout.protocol import Completion, FinishReason, Request, SamplingParams

_MULTIPLIERS = np.array(MULTIPLIERS, np.uint64)
_WEYL = np.array(WEYL, np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return four random words (..., 4) uint32 for `counter` (..., 4) and `key` (..., 2), both uint32."""
    # Words 0 and 2 are multiplied, words 1 and 3 mixed in: two lanes at once.
    lanes = np.moveaxis(counter.astype(np.uint64), -1, 0)
    multiplied, mixed = lanes[0::2], lanes[1::2]
    shape = (2, *(1,) * (lanes.ndim - 1))
    multipliers, weyl = _MULTIPLIERS.reshape(shape), _WEYL.reshape(shape)
    round_key = np.moveaxis(key.astype(np.uint64), -1, 0)
    for _ in range(ROUNDS):
        product = multiplied * multipliers
        multiplied, mixed = (product[::-1] >> _HALF) ^ mixed ^ round_key, product[::-1] & _LOW
        round_key = (round_key + weyl) & _LOW
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]], axis=-1).astype(np.uint32)


def request_key(seed: int, uid: str) -> np.ndarray:
    """Return the Philox key (2,) uint32 of a prompt: blake2b-8 of seed (8 bytes, little-endian, signed) and uid
    (UTF-8).

    The digest's first four bytes are word 0, the others word 1, both little-endian.
    """
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + uid.encode("utf-8"), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def uniforms(keys: np.ndarray, positions: np.ndarray, sample_indices: np.ndarray, step: int) -> np.ndarray:
    """Return one number in (0, 1), fp64 (n,), per token to draw.

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
    """Draw one token per row of `logits` (n, padded vocabulary), any float dtype, with `uniform` fp64 (n,), by
    `hpcrl.kernels.sampling`. Raises FloatingPointError if logits are not finite; -inf is allowed and marks a token that
    is never drawn."""
    numbers = torch.from_numpy(uniform).to(logits.device)
    return checked(
        Sampled(*kernels.sample(logits, numbers, vocab_size, sampling.temperature, sampling.top_k, sampling.top_p))
    )


def checked(drawn: Sampled) -> Sampled:
    check_finite(bool(drawn.log_probs.isfinite().all()))
    return drawn


def check_finite(is_finite: bool) -> None:
    if not is_finite:
        raise FloatingPointError("the policy's logits are not finite: resume from an earlier checkpoint")


def _draw_exact(
    logits: Tensor, uniform: Tensor, vocab_size: int, sampling: SamplingParams, tp: TensorParallel
) -> Sampled:
    """`draw_sharded` with the log-probs of exact mode, of gathered logits."""
    whole = tp.gather_columns(logits)
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    token_ids, _ = kernels.sample(whole, uniform, vocab_size, temperature, top_k, top_p)
    return Sampled(token_ids, exact_log_probs(whole, token_ids.unsqueeze(1), vocab_size, temperature).squeeze(1))


def sample_sharded(
    logits: Tensor, uniform: np.ndarray, vocab_size: int, sampling: SamplingParams, tp: TensorParallel
) -> Sampled:
    """Return `draw_sharded` with `uniform` fp64 (n,) of the host, checked as `sample` checks it."""
    numbers = torch.from_numpy(uniform).to(logits.device)
    return checked(draw_sharded(logits, numbers, vocab_size, sampling, tp))


def draw_sharded(
    logits: Tensor, uniform: Tensor, vocab_size: int, sampling: SamplingParams, tp: TensorParallel
) -> Sampled:
    """Draw one token per row of `logits` (n, padded vocabulary / tp), which start at id rank * width, without gathering
    them, with `uniform` fp64 (n,). Collective; all ranks get the same result. Does not synchronise.

    Each rank sends two numbers a row, its largest score and its sum of weights, and the owner of the token two more.
    Their fp64 sums are combined in rank order, so the token equals that of gathered logits unless u lies within 1e-6 of
    a boundary, because the fp32 exponentials are relative to different maxima. Logits are gathered if a filter needs
    all of them, and where there are no kernels, so that results do not depend on the layout there.
    """
    if tp.exact:
        return _draw_exact(logits, uniform, vocab_size, sampling, tp)
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    filtered = temperature != 0 and (top_k != -1 or top_p < 1)
    if tp.size == 1 or filtered or not use_triton("sampling", logits):
        return Sampled(*kernels.sample(tp.gather_columns(logits), uniform, vocab_size, temperature, top_k, top_p))
    first = tp.rank * logits.size(1)
    own_size = min(max(vocab_size - first, 0), logits.size(1))
    partials = kernels.partials(logits, own_size, temperature)
    gathered = tp.gather_columns(torch.stack([part.double() for part in partials.whole()], 1))
    maxima, sums = gathered.view(len(gathered), -1, 2).unbind(-1)
    highest = maxima.amax(1, keepdim=True)
    masses = sums * (maxima - highest.masked_fill(highest == -torch.inf, 0)).exp()
    ends = torch.stack(list(accumulate(masses.unbind(1))), 1)  # CUDA's cumsum is not deterministic
    bounds = uniform.unsqueeze(1) * ends[:, -1:]
    owns = maxima == highest if temperature == 0 else (ends > bounds) & (masses > 0)
    owned = owns.int().argmax(1) == tp.rank  # the first owner
    before = ends[:, tp.rank - 1 : tp.rank] if tp.rank else torch.zeros_like(bounds)
    share = (bounds - before).squeeze(1) / masses[:, tp.rank]
    share = share.masked_fill_(~owned, 0.5).clamp_(0, 1 - 2**-53)
    token_ids, log_probs = kernels.sample(logits, share, own_size, temperature, partials=partials)
    log_probs = log_probs.double() + (masses[:, tp.rank] / ends[:, -1]).log()
    answer = torch.stack([(token_ids + first).double(), log_probs], 1).masked_fill_(~owned.unsqueeze(1), 0)
    answer = tp.sum(answer)
    return Sampled(answer[:, 0].long(), answer[:, 1].float())


@dataclass(eq=False)
class Drawn:
    """The tokens of one request. key, sample_index: of its random numbers. first: tokens of its response so far, to
    which positions add. Arrays have a place for each token that may be drawn."""

    key: np.ndarray
    sample_index: int
    first: int
    limit: int
    token_ids: np.ndarray = field(init=False)
    log_probs: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids, self.log_probs = np.zeros(self.limit, np.int32), np.zeros(self.limit, np.float32)

    @classmethod
    def of(cls, request: Request, sampling: SamplingParams, seed: int) -> Drawn:
        """Make that of a request, without tokens."""
        key, limit = request_key(seed, request.uid), request.num_to_draw(sampling)
        return cls(key, request.sample_index, request.position, limit)

    def completion(self, count: int, reason: FinishReason) -> Completion:
        """Return the result after `count` tokens."""
        return Completion(self.token_ids[:count], self.log_probs[:count], reason)


@dataclass
class KeyedSampler:
    """Draws the next token of each row. vocab_size: ids that have a probability.

    The log-prob of a token is after temperature and before top-k and top-p.
    """

    vocab_size: int
    sampling: SamplingParams
    step: int

    def draw(self, logits: Tensor, rows: Sequence[Drawn], counts: Sequence[int]) -> Tensor:
        """Return the token of each row, int64 (n,), and record it with its log-prob.

        A row whose prompt is not complete is drawn too; its token is ignored and overwritten. Raises FloatingPointError
        if logits are not finite.

        Args:
            logits: (n, vocabulary), any float dtype.
            counts: tokens that each request has drawn.
        """
        keys = np.stack([row.key for row in rows])
        positions = np.array([row.first + count for row, count in zip(rows, counts, strict=True)])
        numbers = uniforms(keys, positions, np.array([row.sample_index for row in rows]), self.step)
        uniform = torch.from_numpy(numbers).to(logits.device)
        cut = self.sampling.temperature, self.sampling.top_k, self.sampling.top_p
        token_ids, log_probs = kernels.sample(logits, uniform, self.vocab_size, *cut)
        check_finite(bool(log_probs.isfinite().all()))
        drawn = zip(rows, counts, token_ids.tolist(), log_probs.tolist(), strict=True)
        for row, count, token_id, log_prob in drawn:
            row.token_ids[count], row.log_probs[count] = token_id, log_prob
        return token_ids
