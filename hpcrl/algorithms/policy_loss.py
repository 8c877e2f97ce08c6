"""Policy losses: one number per token, before aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hpcrl.algorithms.metrics import Mean, Metric
from hpcrl.algorithms.registry import Registry


@dataclass(frozen=True)
class PolicyLossConfig:
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c is {self.clip_ratio_c}; expected more than 1; verl's default is 3.0")


class PolicyLoss(Protocol):
    def __call__(
        self,
        log_prob: torch.Tensor,
        old_log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        cfg: PolicyLossConfig,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Token losses (B, T) and metrics. All tensors (B, T); log-probs in nats, only `log_prob` carries gradients.

        rollout_is_weights: importance weights of rollout against training, which multiply the token losses.
        """
        ...


LOSSES: Registry[PolicyLoss] = Registry("policy_loss.loss_mode")


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Makes `actor.policy_loss.loss_mode=<name>` call the decorated function."""

    def register(function: PolicyLoss) -> PolicyLoss:
        LOSSES.add(name, function)
        return function

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    return LOSSES.get(name)


@register_policy_loss("vanilla")
def vanilla(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """PPO's clipped loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with dual clip (Ye et al., arXiv 1912.09729).

    r = exp(clamp(log_prob - old_log_prob, -20, 20))
    L1 = max(-A r, -A clip(r, 1 - low, 1 + high));  loss = min(L1, -A c) if A < 0 else L1
    """
    log_ratio = (log_prob - old_log_prob).masked_fill(response_mask == 0, 0.0)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantages * cfg.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(single, bound), single)
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights.detach()
    return loss, {
        "actor/pg_clipfrac": Mean.of(clipped > unclipped, response_mask),
        "actor/ppo_kl": Mean.of(-log_ratio, response_mask),
        "actor/pg_clipfrac_lower": Mean.of((single > bound) & (advantages < 0), response_mask),
    }
