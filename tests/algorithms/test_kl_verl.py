"""KL estimators, the penalty in the reward and the value loss against numbers that verl 0.9.1 gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.kl import apply_kl_in_reward, kl_penalty
from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.value_loss import value_loss
from tests.algorithms.verl_cases.kl import CASES, KINDS

RECORDED = np.load(Path(__file__).parent / "verl_cases" / "kl.npz")


@pytest.fixture(params=CASES)
def case(request):
    """Its tensors, and a check against what verl gave for it."""
    tensors = {key: torch.from_numpy(array) for key, array in CASES[request.param].items()}
    exact = 1e-10 if tensors["log_prob"].dtype == torch.float64 else 1e-5

    def check(key: str, found, tolerance: float = exact) -> None:
        np.testing.assert_allclose(found, RECORDED[f"{request.param}/{key}"], rtol=tolerance, atol=tolerance)

    return tensors, check


def test_estimators_and_their_gradients(case):
    batch, check = case
    for kind in KINDS:
        log_prob = batch["log_prob"].clone().requires_grad_()
        value = kl_penalty(log_prob, batch["ref_log_prob"], kind)
        value.sum().backward()
        check(f"kl {kind}", torch.stack([value.detach(), log_prob.grad]).numpy())


def test_penalty_in_the_reward(case):
    batch, check = case
    rewards, metrics = apply_kl_in_reward(
        batch["scores"],
        batch["log_prob"],
        batch["ref_log_prob"],
        batch["response_mask"],
        beta=0.3,
        kind="low_var_kl",
    )
    check("rewards", rewards.numpy())
    check("reward_kl_penalty", metrics["actor/reward_kl_penalty"].finish())


def test_value_loss(case):
    batch, check = case
    mask = batch["response_mask"]
    vpreds = batch["vpreds"].clone().requires_grad_()
    errors, metrics = value_loss(vpreds, batch["values"], batch["returns"], mask, 0.5)
    loss = agg_loss(errors, mask, "token-mean", LossNorm.of_whole(mask))
    loss.backward()
    check("value_loss", loss.detach().numpy())
    check("value_gradient", vpreds.grad.numpy())
    # verl counts clipped tokens in fp32 unless the mask is fp64
    check("value_metrics", list(finish(metrics).values()), 1e-10 if mask.dtype == torch.float64 else 1e-5)
