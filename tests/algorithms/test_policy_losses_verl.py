"""Policy losses against numbers that verl 0.9.1 gave (tools/record_cases.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.algorithms import policy_loss
from tests.algorithms.verl_cases.policy_loss import CASES, MODES

RECORDED = np.load(Path(__file__).parent / "verl_cases" / "policy_loss.npz")


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert found.shape == expected.shape
    close = np.abs(found - expected) <= tolerance * np.maximum(1, np.abs(expected))
    assert (close | (found == expected) | (np.isnan(found) & np.isnan(expected))).all(), (found, expected)


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_verls(name):
    case = CASES[name]
    batch = {key: torch.from_numpy(array) for key, array in case["batch"].items()}
    weights = batch.pop("weights")
    tolerance = 1e-10 if batch["log_prob"].dtype == torch.float64 else 1e-5
    for i, mode in enumerate(MODES):
        batch["log_prob"] = batch["log_prob"].detach().clone().requires_grad_()
        torch.manual_seed(0)
        loss, metrics = policy_loss(
            case["loss"],
            **batch,
            loss_agg_mode=mode,
            config=case["config"],
            rollout_is_weights=weights if case["weighted"] else None,
        )
        loss.backward()
        assert loss.dtype == batch["log_prob"].dtype
        assert_close(loss.detach().numpy(), RECORDED[f"{name}/loss"][i], tolerance)
        assert_close(batch["log_prob"].grad.numpy(), RECORDED[f"{name}/gradient"][i], tolerance)
        assert sorted(metrics) == RECORDED[f"{name}/names"].tolist()
        assert all(type(value) is float for value in metrics.values())
        fp64_mask = batch["response_mask"].dtype == torch.float64
        for key, expected in zip(sorted(metrics), RECORDED[f"{name}/metrics"], strict=True):
            # verl counts in fp32 unless the mask is fp64, and adds 1e-8 to counts, which rollout_corr/* here do not
            near = 1e-7 if key.startswith("rollout_corr/") else 1e-10
            assert_close(np.array(metrics[key]), expected, near if fp64_mask else 1e-5)
