"""Reductions of estimators: statistics of groups, scans over what follows in a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Of each sample's group, fp64 (B,): size, mean, standard deviation (n - 1; 0 in a group of one)."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(score: Tensor, group: Tensor) -> Moments:
    """score: (B,). group: numbers int64 (B,)."""
    size = torch.bincount(group).double()
    mean = group_sum(score, group) / size
    squares = group_sum((score.double() - mean[group]).square(), group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return Moments(size[group], mean[group], std[group])


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Return sums over each group's samples of x (B, ...), fp64 (G, ...). group: as for `group_moments`."""
    count = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros((count, *x.shape[1:]), dtype=torch.float64).index_add(0, group, x.double())


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next, 0 after a sequence. Where the mask is 0,
    V_next and A_next pass through unchanged: such a token has the A of the next unmasked one, and its r and V are
    ignored.

    rewards, values, mask: (S, T). Returns A (S, T) in the dtype that rewards and values promote to. All that does not
    need A is computed for all positions at once.
    """
    values, valid = values.to(torch.promote_types(values.dtype, rewards.dtype)), mask.bool()
    rank = valid.flatten().cumsum(0).view(valid.shape)  # of the next unmasked token, among all unmasked ones
    counted = torch.cat([values[valid], values.new_zeros(1)])
    next_values = torch.where(rank < rank[:, -1:], counted[rank], 0.0)
    return discounted_returns(rewards + gamma * next_values - values, valid, gamma * lam)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next, in the dtype of the rewards; otherwise as `gae`.

    Position by position; transposed, so that a position is contiguous.
    """
    found = rewards.new_empty(rewards.shape[::-1])
    following = rewards.new_zeros(len(rewards))
    positions = zip(rewards.T.contiguous(), mask.bool().T.contiguous(), found, strict=True)
    for reward, inside, place in reversed(list(positions)):
        following = torch.where(inside, reward + gamma * following, following, out=place)
    return found.T.contiguous()
