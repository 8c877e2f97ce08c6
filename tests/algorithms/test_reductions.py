"""Statistics of groups, and scans over what follows in a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.outcome_advantages import group_moments
from hpcrl.algorithms.token_advantages import discounted_returns, generalized_advantages

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# samples and groups: none, one, groups of one, one of all, numbers without a sample
SIZES = ((0, 1), (1, 1), (20, 20), (17, 1), (90, 40), (30, 200))
GAMMA, LAM = 0.97, 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "groups"), SIZES)
def test_moments(samples: int, groups: int, dtype: torch.dtype) -> None:
    score = (100 + torch.randn(samples)).to(dtype)
    group = torch.randint(groups, (samples,))
    found = group_moments(score, group)
    for sample, number in enumerate(group.tolist()):
        its = score[group == number].double()
        size, mean, std = (part[sample].item() for part in found)
        assert size == len(its)
        assert mean == pytest.approx(its.mean().item(), rel=1e-14)
        assert std == pytest.approx(its.std().item() if len(its) > 1 else 0.0, rel=1e-10, abs=1e-13)
    assert all(part.dtype == torch.float64 and len(part) == samples for part in found)


def test_equal_scores_have_no_deviation_at_all() -> None:
    """A quotient of the two would otherwise be one of rounding errors."""
    assert not group_moments(torch.full((32,), 0.5), torch.arange(32) % 4).std.any()


def by_hand(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """(S, T), by the formula: token after token."""
    found = torch.zeros_like(values)
    next_value = next_found = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_found = torch.where(mask[:, t] != 0, delta + gamma * lam * next_found, next_found)
        next_value = torch.where(mask[:, t] != 0, values[:, t], next_value)
        found[:, t] = next_found
    return found


@pytest.mark.parametrize("shape", [(5, 40), (1, 1), (0, 7), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What does not depend on the advantage behind is done for all positions at once; masked numbers are ignored."""
    mask = torch.rand(shape) < 0.7
    rewards, values = torch.randn(2, *shape).to(dtype).masked_fill(~mask, float("nan"))
    assert torch.equal(
        generalized_advantages(rewards, values, mask, GAMMA, LAM), by_hand(rewards, values, mask, GAMMA, LAM)
    )
    returns = discounted_returns(rewards, mask.long(), GAMMA)
    assert torch.equal(returns, by_hand(rewards, torch.zeros_like(values), mask, GAMMA, 1.0))


@pytest.mark.parametrize("of_values", DTYPES)
@pytest.mark.parametrize("of_rewards", DTYPES)
def test_dtypes_are_promoted(of_rewards: torch.dtype, of_values: torch.dtype) -> None:
    rewards, values = torch.randn(3, 9).to(of_rewards), torch.randn(9, 3).to(of_values).T
    found = generalized_advantages(rewards, values, torch.ones(3, 9), GAMMA, LAM)
    assert found.dtype == torch.promote_types(of_rewards, of_values)
