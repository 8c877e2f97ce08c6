"""Gradients of every policy loss, and which tokens have one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from hpcrl.algorithms import policy_loss
from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from hpcrl.algorithms.surrogate_losses import KlCov
from tests.algorithms.loss_batches import CONFIG, LOSSES, batch_of

F64 = torch.float64
RS = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
CORRECTIONS = [
    {},
    RS,
    {"loss_type": "reinforce"},
    {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.3, **RS},
    {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"},
]
CASES = [(name, {}) for name in LOSSES if name != "bypass_mode"] + [("bypass_mode", given) for given in CORRECTIONS]


class Token(NamedTuple):
    """One that the model wrote. chosen: its covariance is one of those that clip_cov or kl_cov acts on."""

    x: torch.Tensor  # its log-prob, with a gradient
    old: float
    A: float
    weight: float
    chosen: bool

    @property
    def log_r(self) -> float:
        return self.x.item() - self.old

    @property
    def r(self) -> float:
        return math.exp(self.log_r)


def plain(name: str, tokens: list[Token], cfg: Any) -> list[torch.Tensor]:
    """Token losses of one sequence, or one loss of the sequence, written down case by case.

    A tensor carries the gradient, a float does not.
    """
    n, c = len(tokens), getattr(cfg, "clip_ratio_c", math.inf)
    low, high = 1 - getattr(cfg, "clip_ratio_low", 0), 1 + getattr(cfg, "clip_ratio_high", 0)
    product = math.exp(sum(t.log_r for t in tokens))
    if name == "geo_mean":
        exponent = [
            torch.clamp(t.x - t.old, max=cfg.clip_ratio_high)
            if t.A > 0
            else torch.clamp(t.x - t.old, min=-cfg.clip_ratio_low)
            for t in tokens
        ]
        weight = math.prod(t.weight for t in tokens) ** (1 / max(n, 1))
        return [-sum(t.A for t in tokens) / n * torch.exp(sum(exponent) / n) * weight] if n else []

    def clipped(t: Token, dual: float = math.inf) -> torch.Tensor:
        if t.A > 0:
            return -t.A * torch.exp(t.x - t.old) if t.r < high else 0 * t.x - t.A * high
        inside = low < t.r < dual
        return -t.A * torch.exp(t.x - t.old) if inside else 0 * t.x - t.A * min(max(t.r, low), dual)

    def token(t: Token) -> torch.Tensor:
        x, A, ratio, p, q = t.x, t.A, torch.exp(t.x - t.old), math.exp(t.x.item()), math.exp(t.old)
        match name:
            case "vanilla":
                return clipped(t, c)
            case "gspo":
                s = product ** (1 / n)
                held = s > high if A > 0 else s < low
                return 0 * x - A * (high if A > 0 else low) if held else -A * s * torch.exp(x - x.item())
            case "sapo":
                tau = cfg.tau_pos if A > 0 else cfg.tau_neg
                return -A * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            case "gpg":
                return -A * x
            case "cispo":
                return -A * min(max(t.r, low), high) * x
            case "dppo_tv":
                far = p - q > cfg.clip_ratio_high if A > 0 else q - p > cfg.clip_ratio_low
                return 0 * x if far else -A * min(t.r, c) * x
            case "dppo_kl":
                kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                far = (kl > cfg.clip_ratio_high and p > q) if A > 0 else (kl > cfg.clip_ratio_low and p < q)
                return 0 * x if far else -A * min(t.r, c) * x
            case "dro":
                return -(A * x - cfg.dro_beta / 2 * (x - t.old) ** 2)
            case "clip_cov":
                return 0 * x if t.chosen else clipped(t)
            case "kl_cov":
                return -A * ratio + (cfg.ppo_kl_coef * abs(x - t.old) if t.chosen else 0)
            case "bypass_mode":
                if cfg.rollout_rs and not 0.8 < 1 / t.r < 1.25:
                    return 0 * x
                if cfg.loss_type == "ppo_clip":
                    return clipped(t, c)
                weight = {"token": min(t.r, 1.3), "sequence": product if 0.5 < product < 1.5 else 0.0}
                return -A * weight.get(cfg.rollout_is, 1.0) * x
        raise AssertionError(name)

    return [token(t) * (1.0 if name == "bypass_mode" else t.weight) for t in tokens]


def chosen_by_covariance(name: str, batch: dict[str, torch.Tensor], cfg: Any) -> torch.Tensor:
    """bool (B, T), with clip_cov_ratio = 1: all those in its range."""
    valid = batch["response_mask"].bool()
    x, old, A = (batch[key].detach()[valid] for key in ("log_prob", "old_log_prob", "advantages"))
    covariance = (x - x.mean()) * (A - A.mean())
    if name == "kl_cov":
        found = covariance >= covariance.sort(descending=True).values[int(cfg.kl_cov_ratio * len(x)) - 1]
    else:
        r = (x - old).exp()
        held = torch.where(A > 0, r > 1 + cfg.clip_ratio_high, r < 1 - cfg.clip_ratio_low)
        found = (cfg.clip_cov_lb < covariance) & (covariance < cfg.clip_cov_ub) & ~held
    assert 0 < found.sum() < len(found)
    return torch.zeros_like(valid).masked_scatter(valid, found)


@pytest.mark.parametrize(("name", "correction"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_plain_formula(name, correction, seed):
    config = {**CONFIG, "policy_loss.clip_cov_ratio": 1.0, "policy_loss.clip_cov_ub": 0.5}
    policy = POLICY_LOSSES.get(name)
    cfg = policy.parameters({**config, "policy_loss.rollout_correction": correction})
    batch = batch_of(seed)
    batch["log_prob"].clamp_(max=-1e-3).requires_grad_()
    losses = policy(**batch, params=cfg)
    mask = batch["response_mask"] if losses.response_mask is None else losses.response_mask
    found = losses.values.sum() if losses.values.ndim == 1 else (losses.values * mask).sum()
    (gradient,) = torch.autograd.grad(found, batch["log_prob"])

    chosen = chosen_by_covariance(name, batch, cfg) if name.endswith("_cov") else mask.bool()
    total = torch.zeros((), dtype=F64)
    for row, valid in enumerate(batch["response_mask"].bool()):
        columns = (batch[key][row][valid].tolist() for key in ("old_log_prob", "advantages", "rollout_is_weights"))
        tokens = list(map(Token, batch["log_prob"][row][valid], *columns, chosen[row][valid].tolist()))
        total = sum(plain(name, tokens, cfg), total)
    (expected,) = torch.autograd.grad(total, batch["log_prob"])
    assert found.item() == pytest.approx(total.item(), abs=1e-6)  # dppo_kl has 1e-8 in its logarithm
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)
    assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_where_the_policy_has_not_moved_the_gradient_is_the_policy_gradient(name):
    batch = batch_of(3)
    batch["advantages"] = torch.randn(9, 1, dtype=F64, generator=torch.Generator().manual_seed(0)).expand(9, 7).clone()
    batch["log_prob"] = batch["old_log_prob"].clone().requires_grad_()
    policy = POLICY_LOSSES.get(name)
    params = policy.parameters({**CONFIG, "policy_loss.clip_cov_lb": 99})
    losses = policy(**{**batch, "rollout_is_weights": None}, params=params)
    mask, lengths = batch["response_mask"], batch["response_mask"].sum(-1, keepdim=True)
    if name == "geo_mean":
        losses.values.sum().backward()
        expected = -batch["advantages"] * mask / lengths.clamp(min=1)
    else:
        (losses.values * mask).sum().backward()
        expected = -batch["advantages"] * mask
    torch.testing.assert_close(batch["log_prob"].grad, expected, rtol=1e-7, atol=1e-9)


def test_clip_cov_silences_drawn_tokens_of_high_covariance():
    batch = batch_of(5, size=40)
    batch["log_prob"].requires_grad_()
    policy = POLICY_LOSSES.get("clip_cov")
    mask = batch["response_mask"]

    def run(seed: int) -> tuple[torch.Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(seed)
        losses = policy(**batch, params=policy.parameters(CONFIG), generator=generator)
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
    run = POLICY_LOSSES.get("kl_cov")
    batch.pop("rollout_is_weights")
    one, none = (run(**batch, params=KlCov(0.1, coef)).values for coef in (1.0, 0.0))
    added = one - none
    covariance = (score - score[valid].mean()) * (advantages - advantages[valid].mean())
    highest = covariance >= covariance[valid].sort(descending=True).values[int(0.1 * valid.sum()) - 1]
    expected = (batch["log_prob"] - batch["old_log_prob"]).abs() * (highest & valid)
    torch.testing.assert_close(added, expected)
