"""Policy losses: each by hand, their gradients, and what all of them have in common."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms import policy_loss
from hpcrl.algorithms.aggregation import MODES, TokenLosses
from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.policy_losses.lookup import PolicyLossConfig, get_policy_loss, register_policy_loss
from hpcrl.algorithms.policy_losses.registry import LOSSES as REGISTRY
from hpcrl.algorithms.policy_losses.surrogate import ppo_metrics, score_surrogate, sequence_log_ratio
from tests.algorithms.loss_batches import CONFIG, LOSSES, batch_of

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


def plain(name: str, x: list, old: list, advantages: list, cfg: PolicyLossConfig) -> list:
    """Token losses of one sequence's valid tokens, or one loss of the sequence, written down case by case."""
    r = [math.exp(a.item() - b) for a, b in zip(x, old, strict=True)]
    low, high, n = 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high, len(x)
    mean = math.exp(sum(a.item() - b for a, b in zip(x, old, strict=True)) / max(n, 1))
    if name == "geo_mean":
        exponent = sum(
            torch.clamp(a - b, max=cfg.clip_ratio_high) if A > 0 else torch.clamp(a - b, min=-cfg.clip_ratio_low)
            for a, b, A in zip(x, old, advantages, strict=True)
        )
        return [-sum(advantages) / n * torch.exp(exponent / n)] if n else []

    def token(lp: torch.Tensor, lp_old: float, r: float, A: float) -> torch.Tensor:
        ratio, p, q = torch.exp(lp - lp_old), math.exp(lp.item()), math.exp(lp_old)
        match name:
            case "vanilla" | "bypass_mode":
                if A > 0:
                    return -A * ratio if r < high else lp * 0 - A * high
                return lp * 0 - A * min(max(r, low), cfg.clip_ratio_c) if not low < r < cfg.clip_ratio_c else -A * ratio
            case "gspo":
                clipped = mean > high if A > 0 else mean < low
                return lp * 0 - A * (high if A > 0 else low) if clipped else -A * mean * torch.exp(lp - lp.item())
            case "sapo":
                tau = cfg.tau_pos if A > 0 else cfg.tau_neg
                return -A * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            case "gpg":
                return -A * lp
            case "cispo":
                return -A * min(max(r, low), high) * lp
            case "dppo_tv":
                far = p - q > cfg.clip_ratio_high if A > 0 else q - p > cfg.clip_ratio_low
                return -A * min(r, cfg.clip_ratio_c) * lp * (0 if far else 1)
            case "dppo_kl":
                kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                far = (kl > cfg.clip_ratio_high and p > q) if A > 0 else (kl > cfg.clip_ratio_low and p < q)
                return -A * min(r, cfg.clip_ratio_c) * lp * (0 if far else 1)
            case "dro":
                return -(A * lp - cfg.dro_beta / 2 * (lp - lp_old) ** 2)
        raise AssertionError(name)

    return [token(*each) for each in zip(x, old, r, advantages, strict=True)]


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.endswith("_cov")])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_plain_formula(name, seed):
    batch, cfg = batch_of(seed), PolicyLossConfig.from_mapping(CONFIG)
    batch["log_prob"].clamp_(max=-1e-3).requires_grad_()
    losses = get_policy_loss(name)(**{**batch, "rollout_is_weights": None}, cfg=cfg)
    mask = batch["response_mask"]
    found = losses.values.sum() if losses.values.ndim == 1 else (losses.values * mask).sum()
    (gradient,) = torch.autograd.grad(found, batch["log_prob"])

    total = torch.zeros((), dtype=F64)
    for row, valid in enumerate(mask.bool()):
        x = list(batch["log_prob"][row][valid])
        old, advantages = (batch[key][row][valid].tolist() for key in ("old_log_prob", "advantages"))
        total = total + sum(plain(name, x, old, advantages, cfg), torch.zeros((), dtype=F64))
    (expected,) = torch.autograd.grad(total, batch["log_prob"])
    assert found.item() == pytest.approx(total.item(), abs=1e-6)  # dppo_kl has 1e-8 in its logarithm
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)
    assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_where_the_policy_has_not_moved_the_gradient_is_the_policy_gradient(name):
    batch = batch_of(3)
    batch["advantages"] = torch.randn(9, 1, dtype=F64, generator=torch.Generator().manual_seed(0)).expand(9, 7).clone()
    batch["log_prob"] = batch["old_log_prob"].clone().requires_grad_()
    cfg = PolicyLossConfig.from_mapping({**CONFIG, "policy_loss.clip_cov_lb": 99})
    losses = get_policy_loss(name)(**{**batch, "rollout_is_weights": None}, cfg=cfg)
    mask, lengths = batch["response_mask"], batch["response_mask"].sum(-1, keepdim=True)
    if name == "geo_mean":
        losses.values.sum().backward()
        expected = -batch["advantages"] * mask / lengths.clamp(min=1)
    else:
        (losses.values * mask).sum().backward()
        expected = -batch["advantages"] * mask
    torch.testing.assert_close(batch["log_prob"].grad, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("dro", "kl_cov", "clip_cov", "bypass_mode")])
def test_losses_scale_with_advantages_and_with_rollout_weights(name):
    """dro and kl_cov add what does not scale, clip_cov bounds a covariance, bypass_mode has weights of its own."""
    batch = batch_of(1)
    weights = batch.pop("rollout_is_weights").requires_grad_()
    loss, _ = policy_loss(name, **batch, config=CONFIG, rollout_is_weights=weights)
    twice, _ = policy_loss(name, **batch, config=CONFIG, rollout_is_weights=2 * weights)
    thrice, _ = policy_loss(name, **{**batch, "advantages": 3 * batch["advantages"]}, config=CONFIG)
    plain, _ = policy_loss(name, **batch, config=CONFIG)
    assert twice.item() == pytest.approx(2 * loss.item()) and thrice.item() == pytest.approx(3 * plain.item())
    assert loss.item() != pytest.approx(plain.item()) and not loss.requires_grad  # none for the weights


@pytest.mark.parametrize("name", LOSSES)
def test_padding_may_hold_anything_and_masks_any_number_type(name):
    batch = batch_of(2)
    outside = batch["response_mask"] == 0
    wild = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=F64).repeat(16)[:63].view(9, 7)

    def run(batch: dict) -> tuple:
        batch = {**batch, "log_prob": batch["log_prob"].clone().requires_grad_()}
        torch.manual_seed(0)
        loss, metrics = policy_loss(name, **batch, loss_agg_mode="seq-mean-token-mean", config=CONFIG)
        loss.backward()
        return loss, metrics, batch["log_prob"].grad

    loss, metrics, gradient = run(batch)
    dirty = {key: x if key == "response_mask" else x.where(~outside, wild) for key, x in batch.items()}
    assert gradient[outside].count_nonzero() == 0 and gradient.count_nonzero() > 0
    for kind in (torch.bool, torch.int64, torch.float32, F64):
        again, their_metrics, their_gradient = run({**dirty, "response_mask": batch["response_mask"].to(kind)})
        assert again.item() == pytest.approx(loss.item(), rel=1e-7, abs=1e-8)
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


def test_clip_cov_silences_drawn_tokens_of_high_covariance():
    batch = batch_of(5, size=40)
    batch["log_prob"].requires_grad_()
    cfg = PolicyLossConfig.from_mapping(CONFIG)
    mask = batch["response_mask"]

    def run(seed: int) -> tuple[torch.Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(seed)
        losses = get_policy_loss("clip_cov")(**batch, cfg=cfg, generator=generator)
        (gradient,) = torch.autograd.grad((losses.values * mask).sum(), batch["log_prob"])
        return gradient, finish(losses.metrics)

    (gradient, metrics), (again, _), (other, _) = run(1), run(1), run(2)
    assert torch.equal(gradient, again) and not torch.equal(gradient, other)
    whole, _ = policy_loss("vanilla", **batch, loss_agg_mode="token-sum", config={**CONFIG, "clip_ratio_c": 1e9})
    (full,) = torch.autograd.grad(whole, batch["log_prob"])
    drawn = (gradient == 0) & (full != 0)
    assert drawn.sum() == int(0.1 * mask.sum()) and metrics["actor/pg_clipfrac"] == pytest.approx(
        drawn.sum() / mask.sum()
    )
    valid = mask.bool()
    score, advantages = batch["log_prob"].detach(), batch["advantages"]
    covariance = (score - score[valid].mean()) * (advantages - advantages[valid].mean())
    assert covariance[drawn].min() > 0.01 and covariance[drawn].max() < 5


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance():
    batch = batch_of(6, size=40)
    valid, score, advantages = batch["response_mask"].bool(), batch["log_prob"], batch["advantages"]
    run = get_policy_loss("kl_cov")
    batch.pop("rollout_is_weights")
    one, none = (run(**batch, cfg=PolicyLossConfig(kl_cov_ratio=0.1, ppo_kl_coef=coef)).values for coef in (1.0, 0.0))
    added = one - none
    covariance = (score - score[valid].mean()) * (advantages - advantages[valid].mean())
    highest = covariance >= covariance[valid].sort(descending=True).values[int(0.1 * valid.sum()) - 1]
    expected = (batch["log_prob"] - batch["old_log_prob"]).abs() * (highest & valid)
    torch.testing.assert_close(added, expected)


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
    get_policy_loss("dro").check(PolicyLossConfig(dro_beta=0.1))
    for name, wrong, message in (
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; expected more than 1"),
        ("dro", {}, "dro_beta is None; dro needs a number above 0"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, "clip_cov_ratio is 0.0; expected more than 0"),
        ("kl_cov", {"kl_cov_ratio": -1.0}, "kl_cov_ratio is -1.0; expected more than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            get_policy_loss(name).check(PolicyLossConfig(**wrong))
    with pytest.raises(ValueError, match="unknown policy_loss.loss_mode 'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")
