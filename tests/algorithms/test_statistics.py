"""Data metrics by hand, and the same over any split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.algorithms.statistics import (
    response_statistics,
    rollout_log_prob_statistics,
    variance_proxy_statistics,
)
from tests.algorithms.verl_cases import statistics as family

RECORDED = json.loads(Path(family.__file__).with_suffix(".json").read_text())

BATCH = {
    "prompt_length": torch.tensor([3, 4, 4]),
    "response_length": torch.tensor([2, 3, 0]),
    "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]),
    "token_level_rewards": torch.tensor([[-0.5, 1.0, 0.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]]),
    "advantages": torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, -2.0], [9.0, 9.0, 9.0]]),
    "returns": torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 4.0], [9.0, 9.0, 9.0]]),
    "values": torch.tensor([[1.0, 2.5, 9.0], [3.0, 9.0, 3.5], [9.0, 9.0, 9.0]]),
    "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),
}


def test_by_hand():
    """The third sample is empty: it has a length but no score. Token 1 of the second is a tool's."""
    found = finish(response_statistics(**BATCH, max_prompt_length=8, max_response_length=3))
    residuals = np.var([0.0, -0.5, 0.0, 0.5], ddof=1)
    assert found == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/rewards/mean": 0.375,
            "critic/rewards/max": 0.5,
            "critic/rewards/min": 0.25,
            "critic/advantages/mean": 1.0,
            "critic/advantages/max": 3.0,
            "critic/advantages/min": -2.0,
            "critic/returns/mean": 2.5,
            "critic/returns/max": 4.0,
            "critic/returns/min": 1.0,
            "critic/values/mean": 2.5,
            "critic/values/max": 3.5,
            "critic/values/min": 1.0,
            "critic/vf_explained_var": 1 - residuals / (np.var([1, 2, 3, 4], ddof=1) + 1e-5),
            "response_length/mean": 5 / 3,
            "response_length/max": 3.0,
            "response_length/min": 0.0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 2.5,
            "response_length_non_aborted/max": 3.0,
            "response_length_non_aborted/min": 2.0,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 1 / 3,
            "prompt_length/mean": 11 / 3,
            "prompt_length/max": 4.0,
            "prompt_length/min": 3.0,
            "prompt_length/clip_ratio": 0.0,
        }
    )


def test_without_a_critic_there_are_no_value_metrics():
    batch = {key: column for key, column in BATCH.items() if key != "values"}
    keys = response_statistics(**batch, max_prompt_length=8, max_response_length=3)
    assert not any("value" in key or "vf_" in key for key in keys)


def test_rollout_against_training_by_hand():
    rollout = torch.tensor([[0.5, 0.2, 0.9]], dtype=torch.float64).log()
    training = torch.tensor([[0.4, 0.25, 0.1]], dtype=torch.float64).log()
    found = finish(rollout_log_prob_statistics(rollout, training, torch.tensor([[1, 1, 0]])))
    assert found == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_mean": 0.075,
            "training/rollout_probs_diff_std": np.std([0.1, 0.05], ddof=1),
            "training/rollout_actor_probs_pearson_corr": 1.0,
            "training/rollout_log_probs_diff_max": np.log(1.25),
            "training/rollout_log_probs_diff_mean": np.log(1.25),
        }
    )


@pytest.mark.parametrize("case", family.CASES)
def test_as_verl(case):
    inputs = {key: torch.as_tensor(x) if isinstance(x, np.ndarray) else x for key, x in family.CASES[case].items()}

    def columns(*names: str) -> dict:
        return {name: inputs[name] for name in names}

    mask = inputs["response_mask"]
    found = response_statistics(
        **columns("token_level_scores", "token_level_rewards", "advantages", "returns", "values", "response_mask"),
        prompt_length=inputs["prompt_length"],
        response_length=inputs["response"].sum(-1),
        max_prompt_length=family.PROMPT,
        max_response_length=family.WIDTH,
    )
    found |= rollout_log_prob_statistics(inputs["rollout_log_probs"], inputs["old_log_probs"], mask)
    found |= variance_proxy_statistics(
        **columns("old_log_probs", "sum_pi_squared", "advantages", "response_mask", "grad_norm"),
        rollout_is_weights=inputs.get("rollout_is_weights"),
    )
    metrics = finish(found)
    ours = {"training/rollout_log_probs_diff_max", "training/rollout_log_probs_diff_mean"}
    assert metrics.keys() - ours == RECORDED[case].keys()
    assert {key: metrics[key] for key in RECORDED[case]} == pytest.approx(
        RECORDED[case], rel=1e-5, abs=1e-5, nan_ok=True
    )


def test_variance_proxies_by_hand():
    """W is 1 - 2/2 + 1/2 = 1/2 a token: 1 and 1/2 for the two samples, with mean advantages 2 and -4."""
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    batch = {
        "old_log_probs": half.log(),
        "sum_pi_squared": half,
        "advantages": torch.tensor([[1.0, 3.0], [-4.0, 9.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    assert finish(variance_proxy_statistics(**batch, grad_norm=2.0)) == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 4.0,
            "variance_proxy/proxy2_total_power": (4 * 1 + 16 * 0.5) / 2,
            "variance_proxy/proxy3_pure_noise": (6.0 - 4.0) / (2 - 1),
            "variance_proxy/expected_a_squared": 10.0,
            "variance_proxy/expected_w": 0.75,
        }
    )


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_replicas_merge_to_the_whole(seed, replicas):
    rng = np.random.default_rng(seed)
    size, width = 8, 6
    lengths = rng.integers(0, width + 1, size)
    lengths[0] = width
    mask = torch.tensor(np.arange(width)[None] < lengths[:, None]).int()
    drawn = {name: torch.tensor(rng.normal(size=(size, width))).float() * mask for name in list(BATCH)[2:7]}
    batch = {"prompt_length": torch.tensor(rng.integers(1, 9, size)), "response_length": torch.tensor(lengths)}
    batch |= drawn | {"response_mask": mask}
    owner = rng.integers(0, replicas, size)

    def measured(rows: np.ndarray) -> dict:
        mine = {name: column[rows] for name, column in batch.items()}
        logs = -mine["values"].abs(), -mine["returns"].abs()
        return {
            **response_statistics(**mine, max_prompt_length=8, max_response_length=width),
            **rollout_log_prob_statistics(*logs, mine["response_mask"]),
            **variance_proxy_statistics(
                old_log_probs=logs[0],
                sum_pi_squared=mine["token_level_scores"].square(),
                advantages=mine["advantages"],
                response_mask=mine["response_mask"],
                rollout_is_weights=mine["returns"].abs(),
                grad_norm=0.1,
            ),
        }

    parts = [measured(np.flatnonzero(owner == replica)) for replica in range(replicas)]
    assert finish(merge(parts)) == pytest.approx(finish(measured(np.arange(size))), rel=1e-9, abs=1e-12, nan_ok=True)
