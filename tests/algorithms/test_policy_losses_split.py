"""One mini-batch, cut up in many ways over replicas and micro-batches: the same loss, gradient and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.algorithms.aggregation import MODES, LossNorm, aggregate
from hpcrl.algorithms.metrics import finish, merge
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from tests.algorithms.loss_batches import CONFIG, LOSSES, batch_of

CORRECTION = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_1.6,0.2"}
WITH_CORRECTION = {**CONFIG, "policy_loss.rollout_correction": CORRECTION}
EXEMPT = ("clip_cov", "kl_cov")  # these compare tokens with the others of the tensor they are given


def train(name: str, mode: str, batch: dict, pieces: list[np.ndarray]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by log_prob and metrics of a mini-batch whose rows come in `pieces`, each padded on its own."""
    mask = batch["response_mask"]
    norm = LossNorm(float(mask.sum()), float(len(mask)), 5.0)
    log_prob = batch["log_prob"].clone().requires_grad_()
    total, metrics = 0.0, []
    for rows in pieces:
        width = int(mask[rows].sum(0).nonzero().max().item() if mask[rows].any() else -1) + 1
        part = {key: x[rows, :width] for key, x in {**batch, "log_prob": log_prob}.items()}
        policy = POLICY_LOSSES.get(name)
        losses = policy(**part, params=policy.parameters(WITH_CORRECTION))
        share = aggregate(losses, part["response_mask"], mode, norm)
        share.backward()
        total += share.item()
        metrics.append(losses.metrics)
    return total, log_prob.grad, finish(merge(metrics))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in EXEMPT])
def test_any_split_is_the_whole(name, mode):
    rng = np.random.default_rng(0)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        batch = batch_of(8, size=12, dtype=dtype)
        batch["response_mask"] = batch["response_mask"].float()
        loss, gradient, metrics = train(name, mode, batch, [np.arange(12)])
        assert gradient.norm() > 0
        for replicas in (1, 2, 4):
            for micro_batches in (1, 3, 7):
                home = rng.integers(0, replicas * micro_batches, 12)  # uneven, and some have nothing
                pieces = [np.flatnonzero(home == i) for i in range(replicas * micro_batches)]
                found, their_gradient, their_metrics = train(name, mode, batch, pieces)
                assert found == pytest.approx(loss, rel=tolerance, abs=tolerance)
                assert (their_gradient - gradient).norm() <= tolerance * gradient.norm()
                assert their_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-6)
