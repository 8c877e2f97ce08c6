"""The dual-clip PPO loss: every branch by hand, its gradient, its metrics."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.policy_loss import PolicyLossConfig, get_policy_loss, vanilla

CFG = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
F64 = torch.float64


def loss_of(ratio: float, advantage: float, cfg: PolicyLossConfig = CFG, **kwargs):
    """Loss, its derivative by log_prob, and metrics of one token."""
    log_prob = torch.tensor([[math.log(ratio) - 1.0]], dtype=F64, requires_grad=True)
    old, mask = torch.full((1, 1), -1.0, dtype=F64), torch.ones(1, 1)
    loss, metrics = vanilla(log_prob, old, torch.full((1, 1), advantage, dtype=F64), mask, cfg, **kwargs)
    loss.sum().backward()
    return loss.item(), log_prob.grad.item(), finish(metrics)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "clipped_lower"),
    [
        (1.1, 2.0, -2.2, -2.2, 0, 0),  # A > 0 inside the range
        (1.5, 2.0, -2.6, 0.0, 1, 0),  # A > 0 above: held at 1.3
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # A > 0 below: the worse, unclipped, counts
        (0.9, -2.0, 1.8, 1.8, 0, 0),  # A < 0 inside the range
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # A < 0 below: held at 0.8
        (2.0, -2.0, 4.0, 4.0, 0, 0),  # A < 0 above: unclipped, under the dual bound
        (4.0, -2.0, 6.0, 0.0, 0, 1),  # A < 0 far above: held at c = 3
        (4.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_every_branch(ratio, advantage, loss, gradient, clipped, clipped_lower):
    found, derivative, metrics = loss_of(ratio, advantage)
    assert found == pytest.approx(loss) and derivative == pytest.approx(gradient)
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": -math.log(ratio),
            "actor/pg_clipfrac_lower": clipped_lower,
        }
    )


def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient():
    loss, gradient, _ = loss_of(1.0, -2.0)
    assert loss == pytest.approx(2.0) and gradient == pytest.approx(2.0)


def test_the_log_ratio_is_clamped_at_twenty():
    loss, gradient, _ = loss_of(math.exp(25), 2.0, PolicyLossConfig(0.2, 1e12))
    assert loss == pytest.approx(-2 * math.exp(20)) and gradient == 0


def test_rollout_weights_multiply_and_carry_no_gradient():
    weights = torch.full((1, 1), 0.5, dtype=F64, requires_grad=True)
    loss, gradient, _ = loss_of(1.1, 2.0, rollout_is_weights=weights)
    assert loss == pytest.approx(-1.1) and gradient == pytest.approx(-1.1) and weights.grad is None


def test_metrics_are_means_over_valid_tokens():
    log_prob = torch.tensor([[0.5, 0.0, 0.0]])
    old, advantages = torch.zeros(1, 3), torch.ones(1, 3)
    _, metrics = vanilla(log_prob, old, advantages, torch.tensor([[1, 1, 0]]), CFG)
    assert metrics["actor/pg_clipfrac"].weight == 2
    assert finish(metrics) == pytest.approx(
        {"actor/pg_clipfrac": 0.5, "actor/ppo_kl": -0.25, "actor/pg_clipfrac_lower": 0.0}
    )


def test_padding_may_hold_infinities_without_spoiling_gradients():
    log_prob = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    loss, metrics = vanilla(log_prob, torch.tensor([[-1.0, 0.0]]), torch.ones(1, 2), torch.tensor([[1, 0]]), CFG)
    (loss * torch.tensor([[1, 0]])).sum().backward()
    assert log_prob.grad.tolist() == [[-1.0, 0.0]] and finish(metrics)["actor/ppo_kl"] == 0


def test_registry_and_config():
    assert get_policy_loss("vanilla") is vanilla
    with pytest.raises(ValueError, match="unknown policy_loss.loss_mode 'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")
    with pytest.raises(ValueError, match="expected more than 1"):
        PolicyLossConfig(clip_ratio_c=1.0)
