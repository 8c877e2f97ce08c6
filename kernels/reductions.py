"""Reductions of estimators: statistics of groups, masked whitening, scans over what follows in a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FLOATS, use_triton

if TYPE_CHECKING:
    from hpcrl.kernels.reductions_triton import TritonWhitening


class Moments(NamedTuple):
    """Of each sample's group, fp64 (B,): size, mean, standard deviation (n - 1; 0 in a group of one)."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(score: Tensor, group: Tensor) -> Moments:
    """score: (B,). group: numbers int64 (B,).

    Triton adds in the order of the samples, without atomics, so that results are bitwise reproducible. In addition to
    the sort of the groups it moves the scores in twice and three numbers per sample out.
    """
    if len(score) and _in_triton(score):
        from hpcrl.kernels.reductions_triton import group_moments as fused

        return Moments(*fused(score, group))
    size = torch.bincount(group).double()
    mean = group_sum(score, group) / size
    squares = group_sum((score.double() - mean[group]).square(), group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return Moments(size[group], mean[group], std[group])


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Return sums over each group's samples of x (B, ...), fp64 (G, ...). group: as for `group_moments`; Triton adds in
    the order of the samples and reads each number once."""
    if x.numel() and _in_triton(x):
        from hpcrl.kernels.reductions_triton import group_sum as fused

        return fused(x, group)
    count = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros((count, *x.shape[1:]), dtype=torch.float64).index_add(0, group, x.double())


def _in_triton(x: Tensor) -> bool:
    """Whether to use the kernels, which compute in fp64 and accept it in addition to the usual dtypes."""
    return use_triton("group_statistics", x.new_empty(0, dtype=torch.float32) if x.dtype == torch.float64 else x)


def masked_values(x: Tensor, mask: Tensor) -> TorchWhitening | TritonWhitening:
    """Return the passes of masked whitening over x, mask: of one shape. Values where the mask is 0 are ignored; else
    the mask is their weight.

    All is computed in fp64. Torch reads memory for each of the three methods. Triton reads x and mask once for both
    sums: each tile keeps its squares around its own mean (Chan et al. 1979), which is exact for any offset of the
    values, and `result` reads x once more and writes once; without a gradient.
    """
    if use_triton("masked_whiten", x):
        from hpcrl.kernels.reductions_triton import TritonWhitening

        return TritonWhitening(x, mask)
    return TorchWhitening(x, mask)


class TorchWhitening:
    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self._dtype, self._values = x.dtype, x.double()
        self._inside, self._valid = mask.bool(), mask.double()

    def sums(self) -> Tensor:
        """Return fp64 (2,): the sum of the mask, and the weighted sum of the values."""
        return torch.stack([self._valid.sum(), (self._values.masked_fill(~self._inside, 0.0) * self._valid).sum()])

    def squares(self, mean: Tensor) -> Tensor:
        """Return fp64 (1,): the weighted sum of squared distances from `mean` (), fp64."""
        self._deviation = self._values - mean
        return (self._deviation.masked_fill(~self._inside, 0.0).square() * self._valid).sum().reshape(1)

    def result(self, scale: Tensor) -> Tensor:
        """Return (x - mean of `squares`) * scale, in the dtype of x; of all numbers, ignoring the mask."""
        return (self._deviation * scale).to(self._dtype)


class Rows(NamedTuple):
    """Places of sequences that are packed end to end: number i from offsets[i] to offsets[i + 1].

    offsets: int64 (S + 1,), on the tokens' device. longest: at least the tokens of the longest sequence.
    """

    offsets: Tensor
    longest: int


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, rows: Rows | None = None) -> Tensor:
    """Advantages of generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next, 0 after a sequence. Where the mask is 0,
    V_next and A_next pass through unchanged: such a token has the A of the next unmasked one, and its r and V are
    ignored.

    rewards, values, mask: (S, T), or (tokens,) with `rows`. Returns A in their shape, in the dtype that rewards and
    values promote to. Torch computes in this dtype as well, Triton in fp32, where a sequence's bits do not depend on
    its neighbours. Moves three numbers per token in, twice if a sequence has more than one tile, and one out; about 100
    operations.
    """
    values = values.to(torch.promote_types(values.dtype, rewards.dtype))
    if use_triton("segmented_scan", values, unless=_dtype_problem(rewards)):
        return _scan_in_triton(rewards, values, mask, gamma, gamma * lam, rows, values.dtype)
    if rows is None:
        return _gae(rewards, values, mask.bool(), gamma, lam)
    places, inside = _padded(rows)
    return _gae(rewards[places], values[places], mask.bool()[places] & inside, gamma, lam)[inside]


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, rows: Rows | None = None) -> Tensor:
    """G_t = r_t + gamma G_next, in the dtype of the rewards; otherwise as `gae`."""
    if use_triton("segmented_scan", rewards):
        return _scan_in_triton(rewards, None, mask, gamma, gamma, rows, rewards.dtype)
    if rows is None:
        return _discounted(rewards, mask.bool(), gamma)
    places, inside = _padded(rows)
    return _discounted(rewards[places], mask.bool()[places] & inside, gamma)[inside]


def _scan_in_triton(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    gamma: float,
    decay: float,
    rows: Rows | None,
    dtype: torch.dtype,
) -> Tensor:
    from hpcrl.kernels.reductions_triton import scan

    if rows is None:
        count, longest = rewards.shape
        rows = Rows(torch.arange(count + 1, device=rewards.device) * longest, longest)
    return scan(rewards, values, mask, gamma, decay, rows, dtype)


def _dtype_problem(rewards: Tensor) -> str:
    return "" if rewards.dtype in FLOATS else f"rewards are {rewards.dtype}"


def _gae(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """Of (S, T). All that does not need A is computed for all positions at once."""
    rank = valid.flatten().cumsum(0).view(valid.shape)  # of the next unmasked token, among all unmasked ones
    counted = torch.cat([values[valid], values.new_zeros(1)])
    next_values = torch.where(rank < rank[:, -1:], counted[rank], 0.0)
    return _discounted(rewards + gamma * next_values - values, valid, gamma * lam)


def _discounted(x: Tensor, valid: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_next of (S, T), position by position; transposed, so that a position is contiguous."""
    found = x.new_empty(x.shape[::-1])
    following = x.new_zeros(len(x))
    positions = zip(x.T.contiguous(), valid.T.contiguous(), found, strict=True)
    for value, inside, place in reversed(list(positions)):
        following = torch.where(inside, value + decay * following, following, out=place)
    return found.T.contiguous()


def _padded(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return, for the (S, longest) form, the place of each number and whether there is one."""
    starts, ends = rows.offsets[:-1, None], rows.offsets[1:, None]
    places = starts + torch.arange(rows.longest, device=starts.device)
    inside = places < ends
    return places.masked_fill(~inside, 0), inside
