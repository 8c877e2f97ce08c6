"""Advantage estimators with a number per token or turn: GAE, REINFORCE++, ReMax, the optimal token baseline, GiGPO.

A run computes them on the host, where its columns are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.algorithms.advantages import Result, register_adv_est
from hpcrl.algorithms.aggregation import Reduce, masked_whiten, one_replica
from hpcrl.algorithms.outcome_advantages import (
    Gdpo,
    GroupIds,
    Grpo,
    group_moments,
    group_numbers,
    group_sum,
    grpo,
    two_best,
)
from hpcrl.algorithms.parameters import param, torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Discount:
    gamma: float = param(1.0, ge=0, le=1, help="discount per token")


@dataclass(frozen=True)
class Gae(Discount):
    lam: float = param(1.0, ge=0, le=1, help="lambda of GAE")


@register_adv_est("gae", params=Gae)
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    values: Tensor,
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
    advantages = generalized_advantages(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask, reduce), advantages + values


@register_adv_est("reinforce_plus_plus", params=Discount)
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float, reduce: Reduce = one_replica
) -> Result:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted reward-to-go, whitened over all tokens.

    G_t = r_t + gamma G_next;  returns = G;  A = whiten(G); both 0 where the mask is 0.
    G_next passes unchanged through tokens that the model did not write; their own reward is lost.
    Quirk of verl that is not followed: values that are all equal, whitened, are its fp32 rounding error x 1e4, here 0.
    """
    valid = response_mask.bool()
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    returns = returns.masked_fill(~valid, 0.0)
    return masked_whiten(returns, response_mask, reduce).masked_fill(~valid, 0.0), returns


@register_adv_est("remax")
def remax(token_level_rewards: Tensor, response_mask: Tensor, *, reward_baselines: Tensor) -> Result:
    """ReMax (Li et al. 2023, arXiv 2310.10505): reward-to-go minus the reward of the greedy response.

    A_t = G_t - b on tokens the model wrote. Quirk of verl: a masked token has A_t = G_t, without the baseline; its own
    reward does not count.

    Args:
        reward_baselines: b (B,), of a rollout at temperature 0 of each prompt.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    baselines = (reward_baselines[:, None] * response_mask).to(returns.dtype)
    return returns - baselines, returns


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """G_t (B, T), undiscounted sum of the rewards from t on of tokens that the model wrote."""
    rewards = token_level_rewards.masked_fill(response_mask == 0, 0.0)
    return rewards.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class TokenBaseline:
    handle_zero_tail: bool = param(
        True, help="*optimal_token_baseline: none where only the longest response of a group is left"
    )


@register_adv_est("optimal_token_baseline", params=TokenBaseline)
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool,
) -> Result:
    """A_t = G_t - B_t, with a baseline per position: B_t = sum_i(G_t W_t) / (sum_i(W_t) + 1e-8) over the group.

    W_t = sum_{j<=t} w_j; w_j = 1 - 2 pi_j + sum_v pi_v^2 is the squared norm of the gradient of log pi_j in the logits,
    so that B_t minimises the variance of the policy gradient (Li et al. 2026, arXiv 2602.07078).
    pi_j = exp(old_log_probs); rollout_is_weights rho (B, T) make it rho^2 w_j. With handle_zero_tail, B_t = 0 where
    only the longest response of a group is left.

    Quirks of verl: a group of one has baseline 0. Returns of masked tokens are G_t, not 0. The zero tail begins at
    position = number of valid tokens of the second longest, which is too early if there are tool tokens in between:
    `tir_optimal_token_baseline` is right there.

    Args:
        sum_pi_squared: sum over the vocabulary of pi_v^2, (B, T).
    """
    valid = response_mask.bool()
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = _energy(old_log_probs, sum_pi_squared, rollout_is_weights, valid)
    baseline = _baseline(returns, energy, valid, group_numbers(index, returns.device), handle_zero_tail)
    return (returns - baseline).masked_fill(~valid, 0.0).to(returns.dtype), returns


@register_adv_est("tir_optimal_token_baseline", params=TokenBaseline)
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool,
) -> Result:
    """`optimal_token_baseline` for tool use: positions count only the tokens that the model wrote.

    The k-th written token of a response is compared with the k-th of the others, wherever tool tokens stand. Responses
    without such tokens are not in the group: if only one other is left, its baseline is 0.
    """
    valid = response_mask.bool()
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = _energy(old_log_probs, sum_pi_squared, rollout_is_weights, valid)
    advantages = torch.zeros_like(returns)
    rows = valid.any(-1).nonzero()[:, 0]
    if len(rows):
        order = torch.argsort(~valid[rows], dim=-1, stable=True)  # written tokens first
        to_go, spent, written = (x[rows].gather(-1, order) for x in (returns, energy, valid))
        group = torch.unique(group_numbers(index, returns.device)[rows], return_inverse=True)[1]
        compact = to_go - _baseline(to_go, spent, written, group, handle_zero_tail)
        advantages[rows] = torch.zeros_like(compact).scatter(-1, order, compact).to(returns.dtype)
    return advantages.masked_fill(~valid, 0.0), returns


def _energy(old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None, valid: Tensor) -> Tensor:
    """W_t (B, T), in the dtype of the inputs, as in verl; w is a rounding error where the policy is certain."""
    step = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        step = step * rollout_is_weights.square()
    return step.masked_fill(~valid, 0.0).cumsum(-1)


def _baseline(returns: Tensor, energy: Tensor, valid: Tensor, group: Tensor, handle_zero_tail: bool) -> Tensor:
    """B_t of each response, fp64 (B, T).

    Args:
        group: numbers (B,) without gaps.
    """
    weight = energy.double().masked_fill(~valid, 0.0)
    baseline = group_sum(returns * weight, group) / (group_sum(weight, group) + 1e-8)
    baseline = baseline.masked_fill((torch.bincount(group) == 1)[:, None], 0.0)[group]
    if handle_zero_tail:
        length = valid.sum(-1)
        longest, second = two_best(length, group)
        position = torch.arange(valid.shape[-1], device=valid.device)
        tail = (length[longest] > length[second])[:, None] & (position >= length[second][:, None])
        baseline = baseline.index_copy(0, longest, baseline[longest].masked_fill(tail, 0.0))
    return baseline


@dataclass(frozen=True)
class GiGpo(Grpo):
    step_advantage_w: float = param(1.0, ge=0, help="gigpo: weight of the advantage of a turn beside that of the whole")
    step_gamma: float = param(0.95, ge=0, le=1, help="gigpo: discount per turn")


@register_adv_est("gigpo", params=GiGpo)
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: GroupIds,
    turn_states: Tensor,
    norm_adv_by_std_in_grpo: bool,
    step_advantage_w: float,
    step_gamma: float,
) -> Result:
    """Group-in-group policy optimization (Feng et al. 2025, arXiv:2505.10978, equations 3 to 8).

    A = A_grpo + step_advantage_w (G_k - mean) / (std + 1e-6), where G_k is the discounted sum of rewards from turn k
    on, and mean and std are of the turns of the same prompt that begin in the same state. A turn whose state no other
    has gets A_grpo. Without norm_adv_by_std_in_grpo both are only centered. Both results are A, 0 where the mask is 0.

    Args:
        turn_states: (B, T), a number of the state before the turn on its last token, 0 elsewhere.
    """
    whole, _ = grpo(token_level_rewards, response_mask, index=index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    ends = turn_states != 0
    if not ends.any():
        return whole, whole.clone()
    returns = discounted_by_turn(token_level_rewards, ends, step_gamma)[ends]
    samples, _ = ends.nonzero(as_tuple=True)
    prompts = group_numbers(index, ends.device)[samples].tolist()
    group = group_numbers([*zip(prompts, turn_states[ends].tolist(), strict=True)], ends.device)
    _, mean, std = group_moments(returns, group)
    advantage = returns - mean
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (std + 1e-6)
    of_turn = advantage.new_zeros(ends.shape).masked_scatter(ends, advantage)
    total = whole + step_advantage_w * (until_end(of_turn, ends) * response_mask).to(whole.dtype)
    return total, total.clone()


def discounted_by_turn(rewards: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """G_k (B, T) fp64 on the last token of each turn k: its reward, and gamma G of the next turn.

    Args:
        ends: bool (B, T).
    """
    returns = torch.zeros_like(rewards, dtype=torch.float64)
    after = returns.new_zeros(len(rewards))
    for token in range(rewards.size(1) - 1, -1, -1):
        after = torch.where(ends[:, token], rewards[:, token] + gamma * after, after)
        returns[:, token] = after
    return returns


def until_end(x: Tensor, ends: Tensor) -> Tensor:
    """The entry of `x` (B, T) at the next end of a turn from each token on, 0 after the last."""
    places = torch.arange(x.size(1), device=x.device).expand(ends.shape)
    last = x.size(1) - 1
    following = places.masked_fill(~ends, last).flip(1).cummin(1).values.flip(1)
    return x.gather(1, following)


def generalized_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next, 0 after a sequence. Where the mask is 0,
    V_next and A_next pass through unchanged: such a token has the A of the next unmasked one, and its r and V are
    ignored.

    Returns A (S, T) in the dtype that rewards and values promote to. All that does not need A is computed for all
    positions at once.

    Args:
        rewards, values, mask: (S, T).
    """
    rewards, values = rewards.detach(), values.detach()
    values, valid = values.to(torch.promote_types(values.dtype, rewards.dtype)), mask.bool()
    rank = valid.flatten().cumsum(0).view(valid.shape)  # of the next unmasked token, among all unmasked ones
    counted = torch.cat([values[valid], values.new_zeros(1)])
    next_values = torch.where(rank < rank[:, -1:], counted[rank], 0.0)
    return discounted_returns(rewards + gamma * next_values - values, valid, gamma * lam)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next, in the dtype of the rewards; otherwise as `generalized_advantages`.

    Position by position; transposed, so that a position is contiguous.
    """
    rewards = rewards.detach()
    returns = rewards.new_empty(rewards.shape[::-1])
    following = rewards.new_zeros(len(rewards))
    positions = zip(rewards.T.contiguous(), mask.bool().T.contiguous(), returns, strict=True)
    for reward, inside, place in reversed(list(positions)):
        following = torch.where(inside, reward + gamma * following, following, out=place)
    return returns.T.contiguous()


@dataclass(frozen=True)
class AlgorithmParameters(Gae, Gdpo, GiGpo, TokenBaseline):
    """The parameters of all built-in estimators, as verl has them in `algorithm`."""
