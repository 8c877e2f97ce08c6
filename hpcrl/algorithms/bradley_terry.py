"""The loss of a reward model that learns from preferences."""

from __future__ import annotations

import torch

from hpcrl.algorithms.metrics import Mean, Metric


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, num_pairs: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """This part's share of the loss, a scalar: the sum over all micro-batches and replicas is the loss.

    chosen, rejected: (B,) scores of the two answers of each pair. num_pairs: B over the whole batch.
    sum -log sigmoid(r_chosen - r_rejected) / num_pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155,
    eq. 1). Metrics: accuracy (the share of pairs whose chosen answer scores higher; a tie counts as wrong), margin
    (r_chosen - r_rejected), reward_chosen and reward_rejected, each averaged over pairs.
    """
    margin = chosen - rejected
    every = torch.ones_like(margin)
    return -torch.nn.functional.logsigmoid(margin).sum() / num_pairs, {
        "accuracy": Mean.of(margin > 0, every),
        "margin": Mean.of(margin, every),
        "reward_chosen": Mean.of(chosen, every),
        "reward_rejected": Mean.of(rejected, every),
    }
