"""Policy losses: log-probs and advantages of tokens to one number, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hpcrl.algorithms.aggregation import LossNorm, aggregate
from hpcrl.algorithms.metrics import finish

# importing a family registers its losses
from hpcrl.algorithms.policy_losses import covariance, losses  # noqa: F401
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.policy_losses.registry import LOSSES, PolicyLoss, register_policy_loss

__all__ = ["PolicyLossConfig", "get_policy_loss", "policy_loss", "register_policy_loss"]


def get_policy_loss(name: str) -> PolicyLoss:
    return LOSSES.get(name)


def policy_loss(
    name: str,
    *,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Mapping[str, Any] | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a batch that is the whole mini-batch, a scalar with gradients for `log_prob`, and verl's metrics.

    All tensors (B, T) in fp32 or fp64, log-probs in nats; response_mask bool, int or float, and where it is 0 the
    others may hold anything. config: verl's keys below `actor` (`PolicyLossConfig.from_mapping`). Divisors are
    `LossNorm.of_whole`, as verl's for one micro-batch. clip_cov draws from torch's global generator.
    """
    cfg = PolicyLossConfig.from_mapping(config)
    token_losses = get_policy_loss(name)(log_prob, old_log_prob, advantages, response_mask, cfg, rollout_is_weights)
    mask = response_mask if token_losses.response_mask is None else token_losses.response_mask
    norm = LossNorm.of_whole(mask, cfg.loss_scale_factor)
    if token_losses.values.ndim == 1:
        norm = replace(norm, global_batch_size=len(mask))  # a loss per sequence counts the empty ones too
    return aggregate(token_losses, mask, loss_agg_mode, norm), finish(token_losses.metrics)
