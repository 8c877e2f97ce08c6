"""Sums over what follows in a sequence, from its end: advantages and discounted returns of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FLOATS, use_triton


class Rows(NamedTuple):
    """Where sequences lie that are packed end to end: number i from offsets[i] to offsets[i + 1].

    offsets: int64 (S + 1,), on the tokens' device. longest: at least the tokens of the longest sequence.
    """

    offsets: Tensor
    longest: int


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, rows: Rows | None = None) -> Tensor:
    """Advantages of generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next, 0 behind a sequence. Where the mask is 0,
    V_next and A_next pass through unchanged: such a token has the A of the next one that counts, its r and V are lost.

    rewards, values, mask: (S, T), or (tokens,) with `rows`. A in their shape, in the dtype that rewards and values
    promote to, in which torch computes as well; Triton does in fp32, and there a sequence's bits do not depend on its
    neighbours. Moves three numbers a token in, twice where there is more than a tile of a sequence, and one out; does
    about 100 operations.
    """
    values = values.to(torch.promote_types(values.dtype, rewards.dtype))
    if use_triton("segmented_scan", values, unless=_unlike(rewards)):
        return _in_triton(rewards, values, mask, gamma, gamma * lam, rows, values.dtype)
    if rows is None:
        return _gae(rewards, values, mask.bool(), gamma, lam)
    places, inside = _padded(rows)
    return _gae(rewards[places], values[places], mask.bool()[places] & inside, gamma, lam)[inside]


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, rows: Rows | None = None) -> Tensor:
    """G_t = r_t + gamma G_next, in the dtype of the rewards; all else as for `gae`."""
    if use_triton("segmented_scan", rewards):
        return _in_triton(rewards, None, mask, gamma, gamma, rows, rewards.dtype)
    if rows is None:
        return _discounted(rewards, mask.bool(), gamma)
    places, inside = _padded(rows)
    return _discounted(rewards[places], mask.bool()[places] & inside, gamma)[inside]


def _in_triton(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    gamma: float,
    decay: float,
    rows: Rows | None,
    dtype: torch.dtype,
) -> Tensor:
    from hpcrl.kernels.segmented_scan_triton import scan

    if rows is None:
        count, longest = rewards.shape
        rows = Rows(torch.arange(count + 1, device=rewards.device) * longest, longest)
    return scan(rewards, values, mask, gamma, decay, rows, dtype)


def _unlike(rewards: Tensor) -> str:
    return "" if rewards.dtype in FLOATS else f"rewards are {rewards.dtype}"


def _gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """Of (S, T). What needs no A is done for all positions at once."""
    rank = valid.flatten().cumsum(0).view(valid.shape)  # of the next token that counts, among all that do
    counted = torch.cat([values[valid], values.new_zeros(1)])
    next_values = torch.where(rank < rank[:, -1:], counted[rank], 0.0)
    return _discounted(rewards + gamma * next_values - values, valid, gamma * lam)


def _discounted(x: Tensor, valid: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_next of (S, T), position by position; a position is a row here, which lies in one piece."""
    found = x.new_empty(x.shape[::-1])
    following = x.new_zeros(len(x))
    positions = zip(x.T.contiguous(), valid.T.contiguous(), found, strict=True)
    for value, inside, place in reversed(list(positions)):
        following = torch.where(inside, value + decay * following, following, out=place)
    return found.T.contiguous()


def _padded(rows: Rows) -> tuple[Tensor, Tensor]:
    """For the (S, longest) form: where each number is, and whether there is one."""
    starts, ends = rows.offsets[:-1, None], rows.offsets[1:, None]
    places = starts + torch.arange(rows.longest, device=starts.device)
    inside = places < ends
    return places.masked_fill(~inside, 0), inside
