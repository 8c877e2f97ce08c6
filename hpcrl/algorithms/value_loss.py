"""Losses of models with a scalar head: the critic and the reward model."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.aggregation import token_mean
from hpcrl.algorithms.metrics import Mean, Metric


def value_loss(
    vpreds: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, dict[str, Metric]]:
    """Clipped squared error per token, before aggregation; all tensors (B, T), only vpreds carries gradients.

    0.5 max((V - G)^2, (clip(V, V_old - e, V_old + e) - G)^2), as in OpenAI's baselines (ppo2) and verl. Where
    response_mask (bool, int or float) is 0 the others may hold anything, and the error is 0.
    """
    padding = response_mask == 0
    vpreds, old_values, returns = (x.masked_fill(padding, 0.0) for x in (vpreds, old_values, returns))
    clipped_vpreds = torch.maximum(torch.minimum(vpreds, old_values + cliprange_value), old_values - cliprange_value)
    unclipped = (vpreds - returns).square()
    clipped = (clipped_vpreds - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), {
        "critic/vf_clipfrac": token_mean(clipped > unclipped, response_mask),
        "critic/vpred_mean": token_mean(vpreds, response_mask),
    }


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, num_pairs: float) -> tuple[Tensor, dict[str, Metric]]:
    """This part's share of the loss, a scalar: the sum over all micro-batches and replicas is the loss.

    sum -log sigmoid(r_chosen - r_rejected) / num_pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155,
    eq. 1). Metrics: accuracy (the share of pairs whose chosen answer scores higher; a tie counts as wrong), margin
    (r_chosen - r_rejected), reward_chosen and reward_rejected, each averaged over pairs.

    Args:
        chosen, rejected: (B,) scores of the two answers of each pair.
        num_pairs: B over the whole batch.
    """
    margin = chosen - rejected
    every = torch.ones_like(margin)
    return -torch.nn.functional.logsigmoid(margin).sum() / num_pairs, {
        "accuracy": Mean.of(margin > 0, every),
        "margin": Mean.of(margin, every),
        "reward_chosen": Mean.of(chosen, every),
        "reward_rejected": Mean.of(rejected, every),
    }
