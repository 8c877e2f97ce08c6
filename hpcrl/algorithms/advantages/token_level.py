"""Estimators with a return per token: GAE, REINFORCE++ and ReMax.

A run computes them on the host, where its columns rest; tensors on a GPU go through kernels.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.advantages.estimator import Result, register_adv_est
from hpcrl.algorithms.masked import Reduce, masked_whiten, one_replica
from hpcrl.kernels import reductions


@register_adv_est("gae")
def gae(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    values: torch.Tensor,
    gamma: float,
    lam: float,
    reduce: Reduce = one_replica,
) -> Result:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16), whitened.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  returns = A + V (not whitened).
    Tokens the model did not write are skipped: V_next and A_next pass through them unchanged.

    Both in the dtype that torch promotes rewards and values to.

    Quirks of verl: a masked token has the A of the next token the model wrote (0 after the last one), so its return is
    that A + V, and whitening shifts and scales it too: neither is 0. The reward of a masked token is lost.
    """
    advantages = reductions.gae(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask, reduce), advantages + values


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, *, gamma: float, reduce: Reduce = one_replica
) -> Result:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted reward-to-go, whitened over all tokens.

    G_t = r_t + gamma G_next;  returns = G;  A = whiten(G); both 0 where the mask is 0.
    G_next passes unchanged through tokens that the model did not write; their own reward is lost.
    Quirk of verl that is not followed: values that are all equal, whitened, are its fp32 rounding error x 1e4, here 0.
    """
    valid = response_mask.bool()
    returns = reductions.discounted_returns(token_level_rewards, response_mask, gamma)
    returns = returns.masked_fill(~valid, 0.0)
    return masked_whiten(returns, response_mask, reduce).masked_fill(~valid, 0.0), returns


@register_adv_est("remax")
def remax(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, *, reward_baselines: torch.Tensor) -> Result:
    """ReMax (Li et al. 2023, arXiv 2310.10505): reward-to-go minus the reward of the greedy response.

    A_t = G_t - b on tokens the model wrote. reward_baselines: b (B,), of a rollout at temperature 0 of each prompt.
    Quirk of verl: a masked token has A_t = G_t, without the baseline; its own reward does not count.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    baselines = (reward_baselines[:, None] * response_mask).to(returns.dtype)
    return returns - baselines, returns


def reward_to_go(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """G_t (B, T), undiscounted sum of the rewards from t on of tokens that the model wrote."""
    rewards = token_level_rewards.masked_fill(response_mask == 0, 0.0)
    return rewards.flip(-1).cumsum(-1).flip(-1)
