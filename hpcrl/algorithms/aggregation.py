"""From one loss per token to one number, normalised by the global mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcrl.algorithms.masked import masked_mean, masked_sum
from hpcrl.algorithms.registry import UnknownName

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@dataclass(frozen=True)
class LossNorm:
    """Counts of the global mini-batch: over all its micro-batches and replicas.

    batch_num_tokens: tokens with mask 1. global_batch_size: sequences. loss_scale_factor: the divisor of
    seq-mean-token-sum-norm, in tokens (verl: the padded response length).
    """

    batch_num_tokens: float
    global_batch_size: float
    loss_scale_factor: float | None = None


def agg_loss(token_loss: torch.Tensor, response_mask: torch.Tensor, mode: str, norm: LossNorm) -> torch.Tensor:
    """This part's share of the loss, a scalar: the sum over all micro-batches and replicas is the loss.

    token_loss, response_mask: (B, T). There is no factor dp_size: gradients are summed over replicas, not averaged.
    With l the token losses, m the mask, N tokens and B sequences of the global mini-batch:
    token-mean: sum(l m) / N (DAPO, arXiv 2503.14476, eq. 12); token-sum: sum(l m);
    seq-mean-token-sum: sum(l m) / B; seq-mean-token-sum-norm: that / loss_scale_factor (Dr.GRPO, arXiv 2503.20783);
    seq-mean-token-mean: sum over sequences of [sum_t(l m) / (sum_t m + 1e-8)] / B (GRPO, arXiv 2402.03300, eq. 3).
    """
    match mode:
        case "token-mean":
            return masked_sum(token_loss, response_mask) / max(norm.batch_num_tokens, 1)
        case "token-sum":
            return masked_sum(token_loss, response_mask)
        case "seq-mean-token-sum":
            return masked_sum(token_loss, response_mask) / max(norm.global_batch_size, 1)
        case "seq-mean-token-sum-norm":
            if norm.loss_scale_factor is None:
                raise ValueError(f"loss_agg_mode={mode} needs loss_scale_factor; max_response_length is usual")
            scale = max(norm.global_batch_size, 1) * norm.loss_scale_factor
            return masked_sum(token_loss, response_mask) / scale
        case "seq-mean-token-mean":
            return masked_mean(token_loss, response_mask, dim=-1).sum() / max(norm.global_batch_size, 1)
    raise UnknownName(f"unknown loss_agg_mode {mode!r}; there are {', '.join(MODES)}")
