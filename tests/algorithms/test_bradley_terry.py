"""The preference loss: by hand, its gradient, and the same however the pairs are split."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.algorithms.value_loss import bradley_terry_loss


def test_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 3.0, 1.0])
    loss, metrics = bradley_terry_loss(chosen, rejected, 3)
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3)) + math.log(2)) / 3
    assert loss.item() == pytest.approx(expected)
    found = finish(metrics)
    assert found == pytest.approx({"accuracy": 1 / 3, "margin": -2 / 3, "reward_chosen": 1, "reward_rejected": 5 / 3})


def test_gradient_and_size_of_hopeless_pairs() -> None:
    """d loss / d r_chosen = -sigmoid(r_rejected - r_chosen) / pairs, finite where exp would overflow."""
    chosen = torch.tensor([0.3, -500.0, 500.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 500.0, -500.0], dtype=torch.float64, requires_grad=True)
    loss, _ = bradley_terry_loss(chosen, rejected, 4)
    loss.backward()
    expected = -torch.sigmoid(rejected - chosen).detach() / 4
    torch.testing.assert_close(chosen.grad, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rejected.grad, -expected, rtol=1e-12, atol=1e-12)
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-0.2)) + 1000) / 4)


@pytest.mark.parametrize("cuts", [[5], [1, 4], [0, 2, 2, 7]])
def test_parts_add_up(cuts: list[int]) -> None:
    scores = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, metrics = bradley_terry_loss(*scores, 9)
    parts = [bradley_terry_loss(*scores[:, start:stop], 9) for start, stop in zip([0, *cuts], [*cuts, 9], strict=True)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-12, atol=0)
    assert finish(merge(part for _, part in parts)) == pytest.approx(finish(metrics), rel=1e-12)
    # A constant added to all scores is no preference.
    shifted, moved = bradley_terry_loss(*(scores + 7), 9)
    torch.testing.assert_close(shifted, whole, rtol=1e-12, atol=1e-12)
    assert moved["margin"].finish() == pytest.approx(metrics["margin"].finish())
