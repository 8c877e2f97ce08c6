"""Distillation losses: by hand, verl's own numbers, gradients of the plain formula, any split."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.distillation import (
    DISTILLATION_LOSSES,
    Distillation,
    Distilled,
    distillation_loss,
    forward_kl_topk,
    register_distillation_loss,
)
from hpcrl.algorithms.metrics import finish, merge
from hpcrl.algorithms.parameters import UnknownName
from tests.algorithms.verl_cases import distillation as family

RECORDED = np.load(Path(family.__file__).with_suffix(".npz"))


def measured(inputs: dict, cfg: Distillation, logits: torch.Tensor, rows=slice(None)):
    """Token losses and metrics of some rows of a case, from the student's logits."""
    t = {key: torch.as_tensor(value)[rows] for key, value in inputs.items() if key not in ("config", "logits")}
    log_probs = torch.log_softmax(logits[rows], -1)
    return distillation_loss(
        cfg,
        Distilled(
            log_prob=log_probs.gather(-1, t["ids"].unsqueeze(-1)).squeeze(-1),
            response_mask=t["mask"],
            teacher_log_prob=t["teacher_log_prob"],
            student_topk=log_probs.gather(-1, t["topk_ids"]),
            teacher_topk=t["teacher_topk"],
            student_topk_ids=log_probs.topk(family.TOPK).indices,
            teacher_topk_ids=t["topk_ids"],
        ),
        old_log_prob=t["old_log_prob"],
        rollout_is_weights=t["weights"],
    )


@pytest.mark.parametrize("case", family.CASES)
def test_as_verl(case):
    inputs = family.CASES[case]
    logits = torch.tensor(inputs["logits"], requires_grad=True)
    losses, metrics = measured(inputs, Distillation(topk=family.TOPK, **inputs["config"]), logits)
    mask = torch.as_tensor(inputs["mask"])
    loss = agg_loss(losses, mask, "token-mean", LossNorm.of_whole(mask))
    loss.backward()
    tolerance = 1e-10 if logits.dtype == torch.float64 else 1e-5
    assert loss.item() == pytest.approx(RECORDED[f"{case}/loss"].item(), rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(logits.grad, RECORDED[f"{case}/grad"], rtol=tolerance, atol=tolerance)
    recorded = dict(zip(RECORDED[f"{case}/metric_names"].tolist(), RECORDED[f"{case}/metrics"].tolist(), strict=True))
    assert finish(metrics) == pytest.approx(recorded, rel=1e-5, abs=1e-5)


def test_forward_kl_by_hand():
    """Teacher (1/2, 1/4), student (1/4, 1/2) on two ids: log 2 / 2 - log 2 / 4; the reverse is cut at 0."""
    teacher = torch.tensor([[[0.5, 0.25], [0.1, 0.1], [math.nan, 1.0]]], dtype=torch.float64).log()
    student = torch.tensor([[[0.25, 0.5], [0.5, 0.3], [0.2, 0.2]]], dtype=torch.float64).log()
    losses, metrics = distillation_loss(
        Distillation(loss_mode="forward_kl_topk"),
        Distilled(
            log_prob=student[..., 0],
            response_mask=torch.tensor([[1, 1, 0]]),
            student_topk=student,
            teacher_topk=teacher,
            student_topk_ids=torch.tensor([[[1, 7], [8, 9], [0, 0]]]),
            teacher_topk_ids=torch.tensor([[[7, 3], [1, 2], [0, 0]]]),
        ),
    )
    assert losses.tolist()[0] == pytest.approx([math.log(2) / 4, 0.0, 0.0])
    assert finish(metrics) == pytest.approx(
        {
            "distillation/student_mass": (0.75 + 0.8) / 2,
            "distillation/student_mass_min": 0.75,
            "distillation/student_mass_max": 0.8,
            "distillation/teacher_mass": (0.75 + 0.2) / 2,
            "distillation/teacher_mass_min": 0.2,
            "distillation/teacher_mass_max": 0.75,
            "distillation/overlap_ratio": 1 / 4,
            "distillation/overlap_token_advantage": -math.log(2) / 2,
            "distillation/loss_min": 0.0,
            "distillation/loss_max": math.log(2) / 4,
        }
    )


def test_policy_gradient_by_hand():
    """k1 is log 4, clamped to 1: advantage -1 at ratio 1; the better-rewarded second token has advantage log 2."""
    log_prob = torch.tensor([[0.8, 0.25]], dtype=torch.float64).log().requires_grad_()
    losses, metrics = distillation_loss(
        Distillation(loss_mode="k1", use_policy_gradient=True, loss_max_clamp=1.0),
        Distilled(log_prob, torch.ones(1, 2), torch.tensor([[0.2, 0.5]], dtype=torch.float64).log()),
        old_log_prob=log_prob.detach(),
    )
    assert losses.tolist()[0] == pytest.approx([1.0, -math.log(2)])
    losses.sum().backward()
    assert log_prob.grad.tolist()[0] == pytest.approx([1.0, -math.log(2)])
    found = finish(metrics)
    assert found["distillation/loss_max"] == pytest.approx(math.log(4))
    assert found["distillation/abs_loss"] == pytest.approx(1.5 * math.log(2))
    assert found["distillation/ppo_kl"] == 0 and "distillation/pg_clipfrac" in found


# with q the student's probability of a sampled token and p the teacher's
PLAIN = {
    "kl": lambda q, p: q - p,
    "abs": lambda q, p: (q - p).abs(),
    "k2": lambda q, p: (q - p) ** 2 / 2,
    "k3": lambda q, p: p.exp() / q.exp() - 1 - p + q,
}


@pytest.mark.parametrize("mode", [*PLAIN, "forward_kl_topk"])
def test_gradients_of_the_plain_formula(mode):
    inputs = family.EXACT
    mask = torch.as_tensor(inputs["mask"])

    def gradient(token_losses) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.tensor(inputs["logits"], requires_grad=True)
        losses = token_losses(logits)
        (losses * mask).sum().backward()
        return losses.detach() * mask, logits.grad

    def plain(logits: torch.Tensor) -> torch.Tensor:
        probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
        if mode != "forward_kl_topk":
            sampled = probs.gather(-1, torch.as_tensor(inputs["ids"]).unsqueeze(-1)).squeeze(-1)
            return PLAIN[mode](sampled.log(), torch.as_tensor(inputs["teacher_log_prob"]))
        q, p = probs.gather(-1, torch.as_tensor(inputs["topk_ids"])), torch.as_tensor(inputs["teacher_topk"]).exp()
        total = (p * (p / q).log()).sum(-1)
        return torch.where(total > 0, total, torch.zeros_like(total))

    cfg = Distillation(loss_mode=mode)
    for found, expected in zip(gradient(lambda x: measured(inputs, cfg, x)[0]), gradient(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 2**31))
def test_the_whole_vocabulary_gives_the_kl(seed):
    """Non-negative, 0 for equal distributions; a clamped student log-prob has no gradient."""
    rng = np.random.default_rng(seed)
    p, q = (torch.log_softmax(torch.as_tensor(rng.normal(size=(3, 8))), -1) for _ in range(2))
    kl = forward_kl_topk(q, p).sum(-1)
    torch.testing.assert_close(kl, torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    assert (kl >= 0).all() and not forward_kl_topk(p, p).any()
    q.requires_grad_()
    forward_kl_topk(q, p, log_prob_min_clamp=-2.0).sum().backward()
    assert torch.equal(q.grad != 0, q.detach() >= -2.0)


@given(st.integers(0, 2**31), st.sampled_from(sorted(set(DISTILLATION_LOSSES.names()) - {"k1"})), st.booleans())
def test_any_split_merges_to_the_whole(seed, mode, use_policy_gradient):
    owner = np.random.default_rng(seed).integers(0, 3, family.SIZE)
    cfg = Distillation(loss_mode=mode, topk=family.TOPK, use_policy_gradient=use_policy_gradient, **family.CLAMPED)
    logits = torch.as_tensor(family.EXACT["logits"])
    losses, metrics = measured(family.EXACT, cfg, logits)
    parts = [
        (rows, *measured(family.EXACT, cfg, logits, rows)) for rows in (np.flatnonzero(owner == i) for i in range(3))
    ]
    for rows, part, _ in parts:
        assert torch.equal(part, losses[rows])
    assert finish(merge(part for *_, part in parts)) == pytest.approx(finish(metrics), rel=1e-6)


def test_without_policy_gradient_the_padding_may_hold_anything():
    mask = torch.tensor([[1, 0]])
    for mode in set(DISTILLATION_LOSSES.names()) - {"k1"}:
        log_prob = torch.tensor([[-1.0, math.nan]], requires_grad=True)
        topk = torch.tensor([[[-1.0, -2.0], [math.nan, -math.inf]]], requires_grad=True)
        nan = torch.tensor([[-2.0, math.nan]])
        losses, _ = distillation_loss(
            Distillation(loss_mode=mode),
            Distilled(log_prob, mask, nan, topk, topk.detach() + 0.5),
        )
        losses.sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in (log_prob, topk)) and losses.isfinite().all()


def test_a_loss_of_ones_own():
    @register_distillation_loss("half")
    def half(inputs, cfg):
        return 0.5 * inputs.log_prob, {}

    losses, metrics = distillation_loss(Distillation(loss_mode="half"), Distilled(torch.ones(1, 2), torch.ones(1, 2)))
    assert losses.tolist() == [[0.5, 0.5]] and finish(metrics)["distillation/loss_max"] == 0.5
    del DISTILLATION_LOSSES._entries["half"]


def test_what_cannot_work_is_said_at_once():
    with pytest.raises(UnknownName, match="did you mean 'forward_kl_topk'"):
        Distillation(loss_mode="forward_kl")
    with pytest.raises(ValueError, match="loss_mode is k1 without use_policy_gradient"):
        Distillation(loss_mode="k1")
    with pytest.raises(ValueError, match="policy_loss_mode is 'gspo'"):
        Distillation(policy_loss_mode="gspo")
    inputs = Distilled(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(ValueError, match="needs teacher_log_prob"):
        distillation_loss(Distillation(), inputs)
    with pytest.raises(ValueError, match="needs student_topk and teacher_topk"):
        distillation_loss(Distillation(loss_mode="forward_kl_topk"), inputs)
    with pytest.raises(ValueError, match="old_log_prob is missing"):
        cfg = Distillation(use_policy_gradient=True)
        distillation_loss(cfg, replace(inputs, teacher_log_prob=torch.ones(1, 1)))
    assert Distillation(use_task_rewards=False, distillation_loss_coef=3.0).coef == 1.0
    assert Distillation(clip_ratio=0.1, clip_ratio_high=0.3).policy_loss.clip_ratio_low == 0.1
