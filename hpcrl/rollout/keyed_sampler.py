"""Keyed sampling in place of another engine's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels import sampling as kernels
from hpcrl.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from hpcrl.rollout.sampling import check_finite, request_key, uniforms


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

        logits: (n, vocabulary), any float dtype. counts: tokens that each request has drawn. A row whose prompt is not
        complete is drawn too; its token is ignored and overwritten. Raises FloatingPointError if logits are not finite.
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
