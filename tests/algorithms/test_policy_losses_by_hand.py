"""Every policy loss on numbers that can be followed on paper."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms import policy_loss

F64 = torch.float64


def loss_of(name: str, ratio: float, advantage: float, config: dict, *, old: float = -1.0, **kwargs):
    """Loss, its derivative by log_prob, and metrics of one token."""
    log_prob = torch.tensor([[math.log(ratio) + old]], dtype=F64, requires_grad=True)
    loss, metrics = policy_loss(
        name,
        log_prob=log_prob,
        old_log_prob=torch.full((1, 1), old, dtype=F64),
        advantages=torch.full((1, 1), advantage, dtype=F64),
        response_mask=torch.ones(1, 1),
        config=config,
        **kwargs,
    )
    loss.backward()
    return loss.item(), log_prob.grad.item(), metrics


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


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
def test_every_branch_of_vanilla(ratio, advantage, loss, gradient, clipped, clipped_lower):
    found, derivative, metrics = loss_of("vanilla", ratio, advantage, CLIP)
    assert found == pytest.approx(loss) and derivative == pytest.approx(gradient)
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": -math.log(ratio),
            "actor/pg_clipfrac_lower": clipped_lower,
        }
    )


E, LOG2 = math.e, math.log(2)
SIGMOID1 = 1 / (1 + 1 / E)


@pytest.mark.parametrize(
    ("name", "config", "ratio", "advantage", "loss", "gradient"),
    [
        ("gspo", CLIP, 1.1, 2.0, -2.2, -2.2),  # one token: its ratio is the sequence's
        ("gspo", CLIP, 1.5, 2.0, -2.6, 0.0),
        ("gspo", CLIP, 4.0, -2.0, 8.0, 8.0),  # no dual clip
        ("sapo", {"tau_pos": 1.0}, 2.0, 3.0, -3 * SIGMOID1 * 4, -3 * 2 * 4 * SIGMOID1 * (1 - SIGMOID1)),
        ("sapo", {"tau_neg": 2.0}, 1.5, -3.0, 3 * SIGMOID1 * 2, 3 * 1.5 * 4 * SIGMOID1 * (1 - SIGMOID1)),
        ("gpg", {}, 2.0, 3.0, -3 * (LOG2 - 1), -3.0),
        ("cispo", CLIP, 2.0, 3.0, -1.3 * 3 * (LOG2 - 1), -3.9),  # clipped, and a gradient all the same
        ("cispo", CLIP, 0.5, -3.0, 0.8 * 3 * (-LOG2 - 1), 2.4),
        # p_old = 1/e = 0.368, p = 0.736: 0.368 up, KL 0.290
        ("dppo_tv", {"clip_ratio_high": 0.4}, 2.0, 3.0, -2 * 3 * (LOG2 - 1), -6.0),
        ("dppo_tv", {"clip_ratio_high": 0.3}, 2.0, 3.0, 0.0, 0.0),
        ("dppo_tv", {"clip_ratio_low": 0.1}, 2.0, -3.0, 2 * 3 * (LOG2 - 1), 6.0),  # rising is what A < 0 does not want
        ("dppo_tv", {"clip_ratio_c": 1.5, "clip_ratio_high": 0.4}, 2.0, 3.0, -1.5 * 3 * (LOG2 - 1), -4.5),
        ("dppo_kl", {"clip_ratio_high": 0.30}, 2.0, 3.0, -2 * 3 * (LOG2 - 1), -6.0),
        ("dppo_kl", {"clip_ratio_high": 0.28}, 2.0, 3.0, 0.0, 0.0),
        ("dppo_kl", {"clip_ratio_low": 0.05}, 0.5, -3.0, 0.0, 0.0),  # p = 0.184: KL 0.093, falling
        ("dppo_kl", {"clip_ratio_high": 0.05}, 0.5, 3.0, -0.5 * 3 * (-LOG2 - 1), -1.5),
        ("dro", {"policy_loss.dro_beta": 0.5}, 2.0, 3.0, -(3 * (LOG2 - 1) - 0.25 * LOG2**2), -3 + 0.5 * LOG2),
        ("geo_mean", CLIP, 2.0, 3.0, -3 * math.exp(0.3), 0.0),  # the log-ratio is what is clipped
        ("geo_mean", CLIP, 2.0, -3.0, 6.0, 6.0),
        ("clip_cov", CLIP, 1.1, 2.0, -2.2, -2.2),  # one token has no covariance, so none is drawn
        ("kl_cov", {"policy_loss.ppo_kl_coef": 0.5}, 2.0, 3.0, -6 + 0.5 * LOG2, -6 + 0.5),  # the one is the highest
        ("kl_cov", {"policy_loss.ppo_kl_coef": 0.5}, 0.5, 3.0, -1.5 + 0.5 * LOG2, -1.5 - 0.5),
        ("bypass_mode", CLIP, 1.5, 2.0, -2.6, 0.0),
        ("bypass_mode", {"policy_loss.rollout_correction.loss_type": "reinforce"}, 2.0, 3.0, -3 * (LOG2 - 1), -3.0),
        (
            "bypass_mode",
            {"policy_loss": {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}}},
            1.5,
            3.0,
            -1.5 * 3 * (math.log(1.5) - 1),
            -4.5,
        ),
    ],
)
def test_one_token_by_hand(name, config, ratio, advantage, loss, gradient):
    found, derivative, _ = loss_of(name, ratio, advantage, config)
    assert found == pytest.approx(loss, abs=1e-6) and derivative == pytest.approx(gradient, abs=1e-6)


def test_the_log_ratio_is_clamped_at_twenty():
    loss, gradient, _ = loss_of("vanilla", math.exp(25), 2.0, {"clip_ratio_high": 1e12})
    assert loss == pytest.approx(-2 * math.exp(20)) and gradient == 0


def test_sequence_losses_by_hand():
    """Log-ratios 0.6 and -0.2 (a tool token between them does not count): their mean is 0.2."""
    log_prob = torch.tensor([[-0.4, -9.0, -1.2]], dtype=F64, requires_grad=True)
    batch = {
        "log_prob": log_prob,
        "old_log_prob": torch.full((1, 3), -1.0, dtype=F64),
        "advantages": torch.tensor([[2.0, 5.0, 2.0]], dtype=F64),
        "response_mask": torch.tensor([[1, 0, 1]]),
    }
    loss, _ = policy_loss("gspo", **batch, config={"clip_ratio_high": 0.3})
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(-2 * math.exp(0.2))
    assert gradient[0].tolist() == pytest.approx([-math.exp(0.2), 0, -math.exp(0.2)])

    loss, metrics = policy_loss("geo_mean", **batch, config={"clip_ratio_low": 0.1, "clip_ratio_high": 0.3})
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(-2 * math.exp((0.3 - 0.2) / 2))  # the first is clipped, the second is worse
    assert gradient[0].tolist() == pytest.approx([0, 0, -math.exp(0.05)])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1.0)  # both are outside [-0.1, 0.3]


def test_bypass_drops_what_is_rejected_from_loss_and_divisors():
    """Ratios 1.1, 1.2, 4: the last is rejected, so the mean is over two tokens."""
    old = torch.full((1, 3), -2.0, dtype=F64)
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    loss, metrics = policy_loss(
        "bypass_mode",
        log_prob=old + torch.tensor([[1.1, 1.2, 4.0]], dtype=F64).log(),
        old_log_prob=old,
        advantages=torch.ones(1, 3, dtype=F64),
        response_mask=torch.ones(1, 3),
        config={"clip_ratio_high": 9.0, "policy_loss.rollout_correction": correction},
        rollout_is_weights=torch.full((1, 3), 7.0),
    )
    assert loss.item() == pytest.approx(-2.3 / 2)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.1 * 1.2) / 2)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
