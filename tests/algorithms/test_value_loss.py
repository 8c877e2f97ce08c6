"""The clipped value loss, branch by branch."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.value_loss import value_loss


@pytest.mark.parametrize(
    ("vpred", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.32, -0.8, 0),  # inside the range
        (1.9, 1.0, 2.0, 0.125, 0.0, 1),  # ran past 1.5 towards the target: held
        (1.9, 1.0, 0.0, 1.805, 1.9, 0),  # ran away from the target: the larger, unclipped, counts
        (0.1, 1.0, 0.0, 0.125, 0.0, 1),  # past 0.5 from above: held
        (1.0, 1.0, 1.0, 0.0, 0.0, 0),
    ],
)
def test_every_branch(vpred, old, target, loss, gradient, clipped):
    vpreds = torch.tensor([[vpred]], dtype=torch.float64, requires_grad=True)
    old_values, returns = torch.tensor([[[old]], [[target]]], dtype=torch.float64)
    found, metrics = value_loss(vpreds, old_values, returns, torch.ones(1, 1), 0.5)
    found.sum().backward()
    assert found.item() == pytest.approx(loss) and vpreds.grad.item() == pytest.approx(gradient)
    assert finish(metrics) == pytest.approx({"critic/vf_clipfrac": clipped, "critic/vpred_mean": vpred})


def test_metrics_are_means_over_valid_tokens():
    vpreds, zeros = torch.tensor([[2.0, 0.0, 7.0]]), torch.zeros(1, 3)
    _, metrics = value_loss(vpreds, zeros, torch.full((1, 3), 3.0), torch.tensor([[1, 1, 0]]), 0.5)
    assert finish(metrics) == {"critic/vf_clipfrac": 0.5, "critic/vpred_mean": 1.0}


def test_padding_may_hold_anything():
    nan = float("nan")
    vpreds = torch.tensor([[2.0, nan]], requires_grad=True)
    columns = torch.tensor([[0.0, nan]]), torch.tensor([[3.0, float("inf")]])
    errors, metrics = value_loss(vpreds, *columns, torch.tensor([[True, False]]), 0.5)
    errors.sum().backward()
    assert vpreds.grad.tolist() == [[0.0, 0.0]] and errors.tolist() == [[3.125, 0.0]]  # held at 0.5
    assert finish(metrics) == {"critic/vf_clipfrac": 1.0, "critic/vpred_mean": 2.0}
