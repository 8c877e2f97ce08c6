"""What the heads' raw outputs say: log-probs, likeliest tokens, values, scores; (R, ...), one row per output token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.engine.logprob import vocab_parallel_log_probs, vocab_parallel_topk_ids
from hpcrl.engine.microbatch import MicroBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hpcrl.batch.ragged import Ragged

Outputs = dict[str, Tensor]


def values(micro: MicroBatch, raw: Tensor) -> Outputs:
    return {"values": raw.squeeze(1)}


def scores(micro: MicroBatch, raw: Tensor) -> Outputs:
    return {"scores": raw.squeeze(1)}


class VocabularyOutputs:
    """Of logits (R, V / tp), whose columns are split over the ranks of `group`."""

    def __init__(self, group: ProcessGroup, vocab_size: int, exact: bool = False) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._exact = exact

    def log_probs(
        self,
        micro: MicroBatch,
        logits: Tensor,
        *,
        temperature: float,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        ids: Tensor | None = None,
    ) -> Outputs:
        """Of the response tokens, and of the tokens `ids` (R, k) in their places."""
        targets = micro.targets.unsqueeze(1)
        log_probs, entropies, squares = vocab_parallel_log_probs(
            logits,
            targets if ids is None else torch.cat([targets, ids], dim=1),
            group=self._group,
            vocab_size=self._vocab_size,
            temperature=temperature,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
            exact=self._exact,
        )
        outputs = {
            "log_probs": log_probs[:, 0],
            "topk_log_probs": log_probs[:, 1:] if ids is not None else None,
            "entropy": entropies,
            "sum_pi_squared": squares,
        }
        return {name: output for name, output in outputs.items() if output is not None}

    def topk(self, micro: MicroBatch, logits: Tensor, *, temperature: float, k: int) -> Outputs:
        ids = self._likeliest(logits, k)
        outputs = self.log_probs(micro, logits, temperature=temperature, ids=ids)
        return {**outputs, "topk_ids": ids.to(torch.int32)}

    def log_probs_at(
        self, micro: MicroBatch, logits: Tensor, *, temperature: float, entropy: bool, topk_ids: Ragged
    ) -> Outputs:
        ids = logits.new_zeros(1, 1, dtype=torch.int64)  # of a dummy output
        if micro.num_outputs:
            ids = topk_ids.take(micro.rows).values.view(micro.num_outputs, -1).to(ids)
        outputs = self.log_probs(micro, logits, temperature=temperature, entropy=entropy, ids=ids)
        return {**outputs, "own_topk_ids": self._likeliest(logits, ids.size(1))}

    def _likeliest(self, logits: Tensor, k: int) -> Tensor:
        return vocab_parallel_topk_ids(logits, k, group=self._group, vocab_size=self._vocab_size)
