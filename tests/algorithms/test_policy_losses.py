"""What policy losses have in common, whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms import policy_loss
from hpcrl.algorithms.aggregation import MODES, TokenLosses
from hpcrl.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from hpcrl.algorithms.policy_losses import POLICY_LOSSES as REGISTRY
from hpcrl.algorithms.surrogate_losses import Dro, ppo_metrics, score_surrogate, sequence_log_ratio
from tests.algorithms.loss_batches import CONFIG, LOSSES, batch_of

F64 = torch.float64


REINFORCE = {"policy_loss.rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}}
CASES = [*((name, {}) for name in LOSSES), ("bypass_mode", REINFORCE)]


def run(name: str, batch: dict, mode: str = "token-mean", **config) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, its gradient by log_prob, and the metrics of the actor."""
    batch = {**batch, "log_prob": batch["log_prob"].clone().requires_grad_()}
    torch.manual_seed(0)
    loss, metrics = policy_loss(name, **batch, loss_agg_mode=mode, config={**CONFIG, **config})
    loss.backward()
    of_actor = {key: value for key, value in metrics.items() if key.startswith("actor/")}
    return loss.item(), batch["log_prob"].grad, of_actor


def test_all_losses_are_tested():
    assert sorted(LOSSES) == sorted(REGISTRY.names())


@pytest.mark.parametrize(("name", "config"), CASES)
def test_losses_scale_with_advantages_and_with_rollout_weights(name, config):
    """And with the weights of what is added to A r, and the bounds of A's covariance; bypass_mode weighs by itself."""
    batch = batch_of(1)
    weights = batch.pop("rollout_is_weights").requires_grad_()
    scaled = {
        "dro": {"policy_loss.dro_beta": 0.9},
        "kl_cov": {"policy_loss.ppo_kl_coef": 0.3},
        "clip_cov": {"policy_loss.clip_cov_lb": 0.03, "policy_loss.clip_cov_ub": 15.0},
    }
    plain, gradient, _ = run(name, batch, **config)
    thrice, their_gradient, _ = run(
        name, {**batch, "advantages": 3 * batch["advantages"]}, **config, **scaled.get(name, {})
    )
    assert thrice == pytest.approx(3 * plain)
    torch.testing.assert_close(their_gradient, 3 * gradient)

    loss, gradient, _ = run(name, {**batch, "rollout_is_weights": weights}, **config)
    twice, their_gradient, _ = run(name, {**batch, "rollout_is_weights": 2 * weights}, **config)
    factor = 1 if name == "bypass_mode" else 2
    assert twice == pytest.approx(factor * loss) and (loss == pytest.approx(plain)) == (factor == 1)
    torch.testing.assert_close(their_gradient, factor * gradient)
    assert weights.grad is None


@pytest.mark.parametrize(("name", "config"), [case for case in CASES if not case[0].startswith("dppo")])
def test_shifted_log_probs_have_the_same_gradient(name, config):
    """Only the ratio counts, but for dppo, which knows probabilities; a loss that is a score shifts by A."""
    batch = batch_of(2)
    loss, gradient, metrics = run(name, batch, **config)
    shifted = {key: x - 1.5 if "log_prob" in key else x for key, x in batch.items()}
    moved, their_gradient, their_metrics = run(name, shifted, **config)
    torch.testing.assert_close(their_gradient, gradient)
    assert their_metrics == pytest.approx(metrics)
    assert (moved == pytest.approx(loss)) == (name not in ("gpg", "cispo", "dro") and config != REINFORCE)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_equal_rewards_teach_nothing(name, config):
    """Their advantages are 0; what is left is the penalty that dro and kl_cov have besides."""
    batch = batch_of(3)
    batch["advantages"].zero_()
    weights, mask = batch["rollout_is_weights"], batch["response_mask"]
    loss, gradient, _ = run(name, batch, **config, **{"policy_loss.kl_cov_ratio": 1.0})
    log_ratio, zero = (batch["log_prob"] - batch["old_log_prob"]) * mask, torch.zeros_like(mask)
    penalty, slope = {
        "dro": (0.15 * log_ratio.square(), 0.3 * log_ratio),
        "kl_cov": (0.1 * log_ratio.abs(), 0.1 * log_ratio.sign()),
    }.get(name, (zero, zero))
    assert loss == pytest.approx(((penalty * weights).sum() / mask.sum()).item(), abs=1e-12)
    torch.testing.assert_close(gradient, slope * weights / mask.sum())


@pytest.mark.parametrize(("name", "config"), CASES)
@pytest.mark.parametrize("mode", MODES)
def test_tool_tokens_in_the_middle_and_empty_responses_change_nothing(name, config, mode):
    """Except in geo_mean, whose mean counts the empty ones, as verl's does."""
    batch = batch_of(6)
    kept = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    wider = {}
    for key, x in batch.items():
        wider[key] = torch.full((10, 8), 0.0 if key == "response_mask" else 1.7, dtype=F64)
        wider[key][:9, kept] = x
    loss, gradient, metrics = run(name, batch, mode, **config)
    their_loss, their_gradient, their_metrics = run(name, wider, mode, **config)
    share = 9 / 10 if name == "geo_mean" else 1
    assert their_loss == pytest.approx(share * loss)
    torch.testing.assert_close(their_gradient[:9, kept], share * gradient)
    assert their_gradient[9].count_nonzero() == 0 and their_gradient[:, 3].count_nonzero() == 0
    assert their_metrics == pytest.approx(metrics)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_may_hold_anything_and_masks_any_number_type(name):
    batch = batch_of(2)
    outside = batch["response_mask"] == 0
    wild = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=F64).repeat(16)[:63].view(9, 7)

    mode = "seq-mean-token-mean"
    loss, gradient, metrics = run(name, batch, mode)
    dirty = {key: x.where(~outside, wild) for key, x in batch.items()}
    assert gradient[outside].count_nonzero() == 0 and gradient.count_nonzero() > 0
    for kind in (torch.bool, torch.int64, torch.float32, F64):
        again, their_gradient, their_metrics = run(
            name, {**dirty, "response_mask": batch["response_mask"].to(kind)}, mode
        )
        assert again == pytest.approx(loss, rel=1e-7, abs=1e-8)
        torch.testing.assert_close(their_gradient, gradient, rtol=1e-7, atol=1e-9)
        assert their_metrics == pytest.approx(metrics, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_batches_without_tokens_lose_nothing(name, size):
    batch = batch_of(4, size=size)
    batch["response_mask"].zero_()
    batch["log_prob"].requires_grad_()
    for mode in MODES:
        loss, metrics = policy_loss(name, **batch, loss_agg_mode=mode, config=CONFIG)
        loss.backward()
        assert loss.item() == 0 and batch["log_prob"].grad.count_nonzero() == 0
        assert all(metrics[key] == 0 for key in metrics if key.startswith("actor/"))


@pytest.mark.parametrize(
    "name", ["vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro", "bypass_mode"]
)
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_whole_by_the_counts_of_global_batch_info(name, mode):
    batch = batch_of(5)
    counts = {"batch_num_tokens": batch["response_mask"].sum().item(), "global_batch_size": 40, "dp_size": 2}
    config = {f"global_batch_info.{key}": count for key, count in counts.items()}
    loss, gradient, _ = run(name, batch, mode, **config)
    parts = [run(name, {key: x[rows] for key, x in batch.items()}, mode, **config) for rows in (slice(4), slice(4, 9))]
    assert sum(part[0] for part in parts) == pytest.approx(loss) != 0
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    alone, _, _ = run(name, batch, mode, **{"global_batch_info.global_batch_size": 40})
    assert loss == pytest.approx(2 * alone)


def test_a_share_of_a_replica_needs_the_counts_of_all():
    for mode, count in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=f"dp_size 2 and no {count}, which loss_agg_mode={mode} divides by"):
            run("vanilla", batch_of(1), mode, **{"global_batch_info.dp_size": 2})


def test_shapes_are_those_of_the_mask():
    batch = batch_of(1)
    column = {key: batch[key][:, :1] for key in ("advantages", "rollout_is_weights")}
    wide = {key: x.expand(9, 7) for key, x in column.items()}
    for name in LOSSES:
        assert run(name, {**batch, **column})[0] == pytest.approx(run(name, {**batch, **wide})[0])
    for key, wrong, message in (
        ("advantages", batch["advantages"][0], r"advantages is \(7,\) beside response_mask \(9, 7\)"),
        ("old_log_prob", batch["old_log_prob"][:, :1], r"old_log_prob is \(9, 1\) beside response_mask \(9, 7\)"),
        ("rollout_is_weights", batch["advantages"][:1], r"rollout_is_weights is \(1, 7\) beside response_mask"),
        ("response_mask", batch["response_mask"][0], r"response_mask is \(7,\); expected \(samples, tokens\)"),
        ("response_mask", batch["response_mask"].tolist(), "response_mask is a list; expected a tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            run("vanilla", {**batch, key: wrong})


def test_a_new_loss_is_a_few_lines(monkeypatch):
    """Sequence ratios in CISPO's manner; padding, weights and aggregation are none of its business."""
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._entries))

    @register_policy_loss("gspo_cispo")
    def gspo_cispo(log_prob, old_log_prob, advantages, response_mask, cfg):
        ratio = sequence_log_ratio(log_prob, old_log_prob, response_mask).exp()
        weight = ratio.clamp(max=1 + cfg.clip_ratio_high)
        return TokenLosses(score_surrogate(log_prob, advantages, weight), ppo_metrics(ratio.log(), response_mask))

    batch = batch_of(7)
    mask, weights = batch["response_mask"], batch["rollout_is_weights"]
    log_ratio = ((batch["log_prob"] - batch["old_log_prob"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    each = -weights * batch["advantages"] * batch["log_prob"] * log_ratio.nan_to_num().exp().clamp(max=1.25)
    loss, _ = policy_loss("gspo_cispo", **batch, config=CONFIG)
    assert loss.item() == pytest.approx(((each * mask).sum() / mask.sum()).item())


def test_mistakes_are_named_before_there_is_data():
    POLICY_LOSSES.get("dro").check(Dro(dro_beta=0.1))
    for name, wrong, message in (
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; expected a number above 1"),
        ("dro", {}, "dro_beta is null; loss_mode=dro needs a number above 0"),
        ("clip_cov", {"policy_loss.clip_cov_ratio": 0.0}, "clip_cov_ratio is 0.0; expected a number above 0"),
        ("kl_cov", {"policy_loss.kl_cov_ratio": 0.0}, "kl_cov_ratio is 0.0; expected a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(name, **batch_of(1), config=wrong)
    with pytest.raises(ValueError, match="unknown policy_loss.loss_mode 'vanila'; did you mean 'vanilla'"):
        POLICY_LOSSES.get("vanila")
