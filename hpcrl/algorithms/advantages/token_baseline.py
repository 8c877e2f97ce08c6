"""The optimal token baseline: one baseline per group and token position, weighted by gradient energy."""

from __future__ import annotations

import torch

from hpcrl.algorithms.advantages.estimator import Result, register_adv_est
from hpcrl.algorithms.advantages.groups import GroupIds, group_numbers, two_best
from hpcrl.algorithms.advantages.token_level import reward_to_go
from hpcrl.kernels.reductions import group_sum


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    index: GroupIds,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool,
) -> Result:
    """A_t = G_t - B_t, with a baseline per position: B_t = sum_i(G_t W_t) / (sum_i(W_t) + 1e-8) over the group.

    W_t = sum_{j<=t} w_j; w_j = 1 - 2 pi_j + sum_v pi_v^2 is the squared norm of the gradient of log pi_j in the logits,
    so that B_t minimises the variance of the policy gradient (Li et al. 2026, arXiv 2602.07078).
    pi_j = exp(old_log_probs); sum_pi_squared: sum over the vocabulary of pi_v^2, (B, T); rollout_is_weights rho (B, T)
    make it rho^2 w_j. With handle_zero_tail, B_t = 0 where only the longest response of a group is left.

    Quirks of verl: a group of one has baseline 0. Returns of masked tokens are G_t, not 0. The zero tail begins at
    position = number of valid tokens of the second longest, which is too early if there are tool tokens in between:
    `tir_optimal_token_baseline` is right there.
    """
    valid = response_mask.bool()
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = _energy(old_log_probs, sum_pi_squared, rollout_is_weights, valid)
    baseline = _baseline(returns, energy, valid, group_numbers(index, returns.device), handle_zero_tail)
    return (returns - baseline).masked_fill(~valid, 0.0).to(returns.dtype), returns


@register_adv_est("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    index: GroupIds,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool,
) -> Result:
    """`optimal_token_baseline` for tool use: positions count only the tokens that the model wrote.

    The k-th written token of a response is compared with the k-th of the others, wherever tool tokens stand. Responses
    without such tokens are not of the group: beside one of them another is alone, with baseline 0.
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


def _energy(
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
    valid: torch.Tensor,
) -> torch.Tensor:
    """W_t (B, T). In the dtype of the inputs: w is what is left of 1 - 2 + 1 where the policy is sure, in verl too."""
    step = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        step = step * rollout_is_weights.square()
    return step.masked_fill(~valid, 0.0).cumsum(-1)


def _baseline(
    returns: torch.Tensor, energy: torch.Tensor, valid: torch.Tensor, group: torch.Tensor, handle_zero_tail: bool
) -> torch.Tensor:
    """B_t of each response, fp64 (B, T). group: numbers (B,) without gaps."""
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
