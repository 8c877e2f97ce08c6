"""Advantage estimators: rewards of tokens to advantages and returns of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hpcrl.algorithms.masked import Reduce, masked_whiten, one_replica
from hpcrl.algorithms.registry import Registry


@dataclass(frozen=True)
class AdvantageConfig:
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True


class AdvFunction(Protocol):
    def __call__(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        *,
        values: torch.Tensor | None = None,
        group: torch.Tensor | None = None,
        cfg: AdvantageConfig,
        reduce: Reduce = one_replica,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns, both (B, T), 0 where response_mask is 0.

        token_level_rewards: fp32 (B, T), right-padded with 0. response_mask: (B, T), 1 on tokens the model wrote.
        values: (B, T), value before each token. group: int64 (B,), samples of one prompt share a number; all of a
        group are in the batch. reduce: sums fp64 tensors over the data-parallel replicas.
        """
        ...


@dataclass(frozen=True)
class AdvEstimator:
    """A registered estimator and what it asks for."""

    name: str
    function: AdvFunction
    needs_critic: bool
    needs_groups: bool

    def __call__(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        *,
        values: torch.Tensor | None = None,
        group: torch.Tensor | None = None,
        cfg: AdvantageConfig,
        reduce: Reduce = one_replica,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.needs_critic and values is None:
            raise ValueError(f"adv_estimator={self.name} needs the critic's values; none were given")
        if self.needs_groups and group is None:
            raise ValueError(f"adv_estimator={self.name} needs the group of each sample; none were given")
        return self.function(token_level_rewards, response_mask, values=values, group=group, cfg=cfg, reduce=reduce)


ESTIMATORS: Registry[AdvEstimator] = Registry("adv_estimator")


def register_adv_est(
    name: str, needs_critic: bool = False, needs_groups: bool = False
) -> Callable[[AdvFunction], AdvFunction]:
    """Makes `algorithm.adv_estimator=<name>` call the decorated function."""

    def register(function: AdvFunction) -> AdvFunction:
        ESTIMATORS.add(name, AdvEstimator(name, function, needs_critic, needs_groups))
        return function

    return register


def get_adv_estimator(name: str) -> AdvEstimator:
    return ESTIMATORS.get(name)


@register_adv_est("gae", needs_critic=True)
def gae(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
    cfg: AdvantageConfig,
    reduce: Reduce = one_replica,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16), whitened.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  returns = A + V (not whitened).
    Tokens the model did not write are skipped: V_next and A_next pass through them unchanged.
    """
    assert values is not None
    valid = response_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, :1].sum(1))
    for t in reversed(range(values.shape[1])):
        delta = token_level_rewards[:, t] + cfg.gamma * next_value - values[:, t]
        advantage = delta + cfg.gamma * cfg.lam * next_advantage
        advantages[:, t] = advantage
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
    returns = (advantages + values).masked_fill(~valid, 0.0)
    return masked_whiten(advantages, response_mask, reduce), returns


@register_adv_est("grpo", needs_groups=True)
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
    cfg: AdvantageConfig,
    reduce: Reduce = one_replica,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantage (Shao et al. 2024, arXiv 2402.03300, section 4.1.2), the same on all tokens.

    A_i = (R_i - mean_g) / (std_g + 1e-6), std with n - 1; a group of one has mean 0 and std 1.
    Without norm_adv_by_std_in_grpo: R_i - mean_g (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783).
    """
    score = token_level_rewards.double().sum(-1)
    assert group is not None
    count, mean, std = _group_moments(score, group)
    alone = count == 1
    advantage = score - mean.masked_fill(alone, 0.0)
    if cfg.norm_adv_by_std_in_grpo:
        advantage = advantage / (std.masked_fill(alone, 1.0) + 1e-6)
    return _on_every_token(advantage, token_level_rewards, response_mask)


@register_adv_est("rloo", needs_groups=True)
def rloo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
    cfg: AdvantageConfig,
    reduce: Reduce = one_replica,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740), the same on all tokens.

    A_i = R_i - mean of the others = n / (n - 1) (R_i - mean_g); a group of one keeps R_i.
    """
    score = token_level_rewards.double().sum(-1)
    assert group is not None
    count, mean, _ = _group_moments(score, group)
    advantage = torch.where(count > 1, (score - mean) * count / (count - 1).clamp(min=1), score)
    return _on_every_token(advantage, token_level_rewards, response_mask)


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
    cfg: AdvantageConfig,
    reduce: Reduce = one_replica,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted reward-to-go, whitened over all tokens.

    G_t = r_t + gamma G_next;  returns = G;  A = whiten(G).
    G_next passes unchanged through tokens that the model did not write.
    """
    valid = response_mask.bool()
    returns = torch.zeros_like(token_level_rewards)
    following = torch.zeros_like(token_level_rewards[:, :1].sum(1))
    for t in reversed(range(returns.shape[1])):
        following = torch.where(valid[:, t], token_level_rewards[:, t] + cfg.gamma * following, following)
        returns[:, t] = following
    returns = returns.masked_fill(~valid, 0.0)
    return masked_whiten(returns, response_mask, reduce), returns


def _group_moments(score: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Size, mean and standard deviation (n - 1; 0 in a group of one) of each sample's group; all fp64 (B,)."""
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    count = size.double()
    zero = torch.zeros_like(count)
    mean = zero.index_add(0, index, score) / count
    squares = zero.index_add(0, index, (score - mean[index]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return count[index], mean[index], std[index]


def _on_every_token(
    advantage: torch.Tensor, token_level_rewards: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) onto the valid tokens (B, T), as advantages and as returns."""
    tokens = (advantage[:, None] * response_mask).to(token_level_rewards.dtype)
    return tokens, tokens.clone()
