"""KL estimators, their gradients, the penalty in the reward and its controllers."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.kl import (
    KLController,
    KlCtrl,
    apply_kl_in_reward,
    kl_penalty,
)
from hpcrl.algorithms.metrics import finish

HALF = math.exp(-0.5) - 1 + 0.5  # k3 at log_prob - ref = 0.5


@pytest.mark.parametrize(
    ("kind", "difference", "value", "gradient"),
    [
        ("kl", 0.5, 0.5, 1.0),
        ("k1", -0.5, -0.5, 1.0),
        ("abs", -0.5, 0.5, -1.0),
        ("mse", 0.5, 0.125, 0.5),
        ("k2", -3.0, 4.5, -3.0),
        ("low_var_kl", 0.5, HALF, 1 - math.exp(-0.5)),
        ("k3", -1.0, math.e - 2, 1 - math.e),
        ("k3", -5.0, 10.0, 0.0),  # e^5 - 6 is above 10
        ("k3", 30.0, 10.0, 0.0),  # clamped to 20, then to 10
        ("k3", -1000.0, 10.0, 0.0),  # the first clamp keeps the gradient from inf * 0
        ("k3", 0.0, 0.0, 0.0),
        ("k1+", -0.5, -0.5, -0.5),  # straight through: the value of k1, the gradient of k2
        ("abs+", 0.5, 0.5, 0.5),
        ("low_var_kl+", 0.5, HALF, 0.5),
        ("k3+", -5.0, 10.0, -5.0),  # the clamp of the value does not stop the gradient
        ("mse+", -3.0, 4.5, -3.0),
    ],
)
def test_value_and_gradient(kind, difference, value, gradient):
    log_prob = torch.tensor(difference - 2.0, dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(log_prob, torch.tensor(-2.0, dtype=torch.float64), kind)
    kl.backward()
    assert kl.item() == pytest.approx(value) and log_prob.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_k1_and_k3_estimate_the_divergence():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    divergence = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        assert torch.allclose((p * kl_penalty(p.log(), q.log(), kind)).sum(), divergence)


def test_straight_through_kinds_have_the_gradient_of_the_divergence():
    """Averaged over the policy's own samples; k1's mean gradient is 0, whatever the divergence."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)

    def mean_gradient(kind: str) -> torch.Tensor:
        log_p = logits.log_softmax(0)
        return torch.autograd.grad((log_p.exp().detach() * kl_penalty(log_p, q.log(), kind)).sum(), logits)[0]

    log_p = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - q.log())).sum(), logits)
    for kind in ("k1+", "k3+", "abs+", "k2"):
        torch.testing.assert_close(mean_gradient(kind), expected)
    assert mean_gradient("k1").abs().max() < 1e-12 and not torch.allclose(mean_gradient("k3"), expected)


@pytest.mark.parametrize(
    ("kind", "message"), [("full", "needs the logits"), ("full+", "needs the logits"), ("k4", "unknown KL kind 'k4'")]
)
def test_kinds_that_there_are_not_are_named(kind, message):
    with pytest.raises(ValueError, match=message) as caught:
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)
    assert caught.value.user_error


def test_penalty_in_the_reward():
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    log_prob = torch.tensor([[-1.0, -1.0, math.nan], [-1.0, -3.0, 0.0], [0.0, 0.0, 0.0]])
    ref = torch.tensor([[-2.0, -4.0, 0.0], [-3.0, -9.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards, metrics = apply_kl_in_reward(scores, log_prob, ref, mask, beta=0.1, kind="kl")
    expected = torch.tensor([[-0.1, 0.7, 0.0], [1.8, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(rewards, expected, atol=1e-7)
    # Means per sequence 2, 2 and (no tokens) 0, then the mean over three sequences.
    assert finish(metrics) == pytest.approx(
        {"actor/reward_kl_penalty": 4 / 3, "actor/reward_kl_penalty_coeff": 0.1}, rel=1e-6
    )


def test_fixed_controller_stays():
    controller = KLController(KlCtrl("fixed", 0.2, 10))
    controller.update(99.0, 1000)
    controller.load_state_dict(KLController(KlCtrl(kl_coef=0.7)).state_dict())
    assert controller.value == 0.2


@pytest.mark.parametrize(
    ("current", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 64 / 1000), (5.0, 1 + 0.2 * 64 / 1000), (-1.0, 1 - 0.2 * 64 / 1000)],
)
def test_adaptive_controller(current, factor):
    controller = KLController(KlCtrl("adaptive", 0.2, 1000))
    controller.update(current, 64)
    assert controller.value == pytest.approx(0.2 * factor)


def test_adaptive_controller_resumes_and_ignores_empty_steps():
    controller = KLController(KlCtrl("adaptive", kl_coef=0.2, horizon=1000))
    controller.update(1.0, 64)
    again = KLController(KlCtrl("adaptive", kl_coef=0.5, horizon=1000))
    again.load_state_dict(controller.state_dict())
    again.update(math.nan, 0)
    assert again.value == controller.value != 0.2
