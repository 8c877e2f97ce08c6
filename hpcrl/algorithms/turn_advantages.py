"""Advantage estimators with a number per turn of an agent, from the rewards of its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.algorithms.advantages import Result, register_adv_est
from hpcrl.algorithms.outcome_advantages import GroupIds, Grpo, group_numbers, grpo
from hpcrl.algorithms.parameters import LazyModule, param, torch

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.algorithms import reductions
else:
    reductions = LazyModule("hpcrl.algorithms.reductions")


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
    has gets A_grpo. turn_states: (B, T), a number of the state before the turn on its last token, 0 elsewhere. Without
    norm_adv_by_std_in_grpo both are only centered. Both results are A, 0 where the mask is 0.
    """
    whole, _ = grpo(token_level_rewards, response_mask, index=index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    ends = turn_states != 0
    if not ends.any():
        return whole, whole.clone()
    returns = discounted_by_turn(token_level_rewards, ends, step_gamma)[ends]
    samples, _ = ends.nonzero(as_tuple=True)
    prompts = group_numbers(index, ends.device)[samples].tolist()
    group = group_numbers([*zip(prompts, turn_states[ends].tolist(), strict=True)], ends.device)
    _, mean, std = reductions.group_moments(returns, group)
    advantage = returns - mean
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (std + 1e-6)
    of_turn = advantage.new_zeros(ends.shape).masked_scatter(ends, advantage)
    total = whole + step_advantage_w * (until_end(of_turn, ends) * response_mask).to(whole.dtype)
    return total, total.clone()


def discounted_by_turn(rewards: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """G_k (B, T) fp64 on the last token of each turn k: its reward, and gamma G of the next turn. ends: bool (B, T)."""
    found, after = torch.zeros_like(rewards, dtype=torch.float64), rewards.new_zeros(len(rewards), dtype=torch.float64)
    for token in range(rewards.size(1) - 1, -1, -1):
        after = torch.where(ends[:, token], rewards[:, token] + gamma * after, after)
        found[:, token] = after
    return found


def until_end(x: Tensor, ends: Tensor) -> Tensor:
    """The entry of `x` (B, T) at the next end of a turn from each token on, 0 after the last."""
    places = torch.arange(x.size(1), device=x.device).expand(ends.shape)
    last = x.size(1) - 1
    following = places.masked_fill(~ends, last).flip(1).cummin(1).values.flip(1)
    return x.gather(1, following)
