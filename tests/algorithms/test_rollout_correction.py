"""Rollout correction: by hand, verl's own numbers, and the same over any split."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.metrics import finish, merge, to_floats
from hpcrl.algorithms.rollout_correction import OPTIONS, PRESETS, RolloutCorrection, correct_rollout, preset
from tests.algorithms.replicas import on_replicas
from tests.algorithms.verl_cases import rollout_correction as family
from tests.algorithms.verl_cases import rollout_presets

RECORDED = np.load(Path(family.__file__).with_suffix(".npz"))
LOG2 = math.log(2.0)


def correct(old, rollout, mask, **config):
    return correct_rollout(torch.as_tensor(old), torch.as_tensor(rollout), torch.as_tensor(mask), config_of(config))


def config_of(config: dict) -> RolloutCorrection:
    return RolloutCorrection(**config)


@pytest.mark.parametrize("case", family.CASES)
def test_as_verl(case):
    inputs = family.CASES[case]
    found = correct(inputs["old"], inputs["rollout"], inputs["mask"], **inputs["config"])
    exact = inputs["old"].dtype == np.float64
    assert np.array_equal(found.response_mask.numpy(), RECORDED[f"{case}/mask"])
    if f"{case}/weights" in RECORDED:
        tolerance = 1e-10 if exact else 1e-5
        assert found.weights.dtype == torch.as_tensor(inputs["old"]).dtype
        np.testing.assert_allclose(found.weights, RECORDED[f"{case}/weights"], rtol=tolerance, atol=tolerance)
    else:
        assert found.weights is None
    metrics = finish(found.metrics)
    recorded = dict(zip(RECORDED[f"{case}/metric_names"].tolist(), RECORDED[f"{case}/metrics"].tolist(), strict=True))
    assert metrics.keys() == recorded.keys()
    for key, value in recorded.items():
        # verl takes std as sqrt(E[x^2] - E[x]^2) in fp32: half of the digits
        atol = 1e-3 if key.endswith("_std") and not exact else 1e-5
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=atol), key


# two sequences: ratios 2, 1/4, 2 and 4, 1 on the tokens that count; a tool's token between
OLD = torch.tensor([[1.0, 5.0, -2.0, 1.0], [2.0, 0.0, 7.0, 9.0]], dtype=torch.float64) * LOG2
MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])


def test_weights_by_hand():
    zeros = torch.zeros_like(OLD)
    token = correct(OLD, zeros, MASK, rollout_is="token", rollout_is_threshold=2.0)
    assert token.weights.tolist() == pytest.approx(np.array([[2, 0, 0.25, 2], [2, 1, 0, 0]]))
    sequence = correct(OLD, zeros, MASK, rollout_is="sequence", rollout_is_threshold=3.0)
    assert sequence.weights.tolist() == pytest.approx(np.array([[1, 0, 1, 1], [3, 3, 0, 0]]))
    icepop = correct(OLD, zeros, MASK, rollout_is="token", rollout_is_threshold="0.5_2.5")
    assert icepop.weights.tolist() == pytest.approx(np.array([[2, 0, 0, 2], [0, 1, 0, 0]]))
    normalized = correct(
        OLD, zeros, MASK, rollout_is="sequence", rollout_is_threshold=3.0, rollout_is_batch_normalize=True
    )
    assert normalized.weights.tolist() == pytest.approx(np.array([[0.5, 0, 0.5, 0.5], [1.5, 1.5, 0, 0]]))
    metrics = finish(icepop.metrics)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx((5 / 5) ** 2 / (9 / 5))
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((1 + 16) / 2 - 1)
    assert metrics["rollout_corr/kl"] == pytest.approx(-2 * LOG2 / 5)


@pytest.mark.parametrize(
    ("options", "threshold", "kept"),
    [
        ("token_k1", "0.5_2.0", [[1, 0, 0, 1], [0, 1, 0, 0]]),
        # bounds are of rollout / training: 1/4 and 1/2 are below 0.6
        ("token_k1", "0.6_5.0", [[0, 0, 1, 0], [0, 1, 0, 0]]),
        ("token_k2", LOG2**2, [[1, 0, 0, 1], [0, 1, 0, 0]]),
        ("seq_sum_k1", 2.0, [[1, 0, 1, 1], [0, 0, 0, 0]]),
        # 1.25 / 3 and (3 - 2 log 2) / 2
        ("seq_mean_k3", 0.6, [[1, 0, 1, 1], [0, 0, 0, 0]]),
        ("seq_max_k2", 2.0 * LOG2**2 * 1.01, [[1, 0, 1, 1], [1, 1, 0, 0]]),
        ("seq_sum_k1,token_k2", f"2.0,{LOG2**2}", [[1, 0, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_rejection_by_hand(options, threshold, kept):
    found = correct(OLD, torch.zeros_like(OLD), MASK, rollout_rs=options, rollout_rs_threshold=threshold)
    assert found.response_mask.tolist() == kept and found.weights is None
    share = 1 - np.sum(kept) / 5
    assert finish(found.metrics)["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)


@given(st.integers(0, 2**31), st.sampled_from(["token", "sequence"]), st.booleans(), st.booleans())
def test_properties(seed, level, icepop, normalize):
    rng = np.random.default_rng(seed)
    old, rollout = -rng.exponential(1, (2, 4, 6))
    mask = rng.integers(0, 2, (4, 6))
    threshold = "0.5_2.0" if icepop else 2.0
    same = correct(old, old, mask, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=True)
    assert np.allclose(same.weights, mask)  # no mismatch, no weighting
    found = correct(old, rollout, mask, rollout_is=level, rollout_is_threshold=threshold)
    assert not found.weights[torch.as_tensor(mask) == 0].any() and found.weights.max() <= 2.0
    shifted = correct(old + 3.0, rollout + 3.0, mask, rollout_is=level, rollout_is_threshold=threshold)
    assert torch.allclose(shifted.weights, found.weights)
    if normalize and found.weights.any():
        unit = correct(
            old, rollout, mask, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=True
        ).weights
        rows = mask.any(-1)
        means = (unit.numpy() * mask).sum(-1)[rows] / mask.sum(-1)[rows]
        assert np.isclose(unit.sum() / mask.sum() if level == "token" else means.mean(), 1.0)


def test_what_the_mask_hides_and_gradients_do_not_leak():
    old = OLD.clone().requires_grad_()
    rollout = torch.where(MASK == 0, math.nan, 0.0).double()
    config = RolloutCorrection("token", rollout_rs=",".join(OPTIONS), rollout_rs_threshold=9.0)
    hidden, clean = (correct_rollout(old, x, MASK, config) for x in (rollout, torch.zeros_like(OLD)))
    assert not hidden.weights.requires_grad and torch.equal(hidden.weights, clean.weights)
    assert torch.equal(hidden.response_mask, clean.response_mask) and finish(hidden.metrics) == finish(clean.metrics)
    for mask in (MASK.bool(), MASK.float()):
        other = correct_rollout(OLD, torch.zeros_like(OLD), mask, config)
        assert other.response_mask.dtype == mask.dtype and torch.equal(other.weights, clean.weights)


SPLIT_CONFIGS = (
    RolloutCorrection(),
    RolloutCorrection("token", 1.5, True, ",".join(OPTIONS), 1.4),
    RolloutCorrection("sequence", "0.3_2.0", True, "token_k1", "0.5_1.1"),
)


@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from(SPLIT_CONFIGS))
def test_replicas_merge_to_the_whole(seed, replicas, config):
    """Empty replicas and replicas whose padding differs among them."""
    rng = np.random.default_rng(seed)
    size, width = 7, 6
    old, rollout = (torch.as_tensor(-rng.exponential(0.5, (size, width))) for _ in range(2))
    mask = torch.as_tensor(np.arange(width) < rng.integers(0, width + 1, (size, 1))).int()
    owner = rng.integers(0, replicas, size)
    whole = correct_rollout(old, rollout, mask, config)

    def mine(replica, reduce):
        rows = np.flatnonzero(owner == replica)
        longest = int(mask[rows].sum(-1).max()) if len(rows) else 0
        return correct_rollout(*(column[rows, :longest] for column in (old, rollout, mask)), config, reduce)

    parts = on_replicas(replicas, mine)
    for replica, part in enumerate(parts):
        rows = np.flatnonzero(owner == replica)
        longest = part.response_mask.shape[1]
        assert torch.equal(part.response_mask, whole.response_mask[rows, :longest])
        if whole.weights is not None:
            torch.testing.assert_close(part.weights, whole.weights[rows, :longest], rtol=1e-9, atol=1e-12)
    merged = finish(merge(to_floats(part.metrics) for part in parts))
    assert merged == pytest.approx(finish(whole.metrics), rel=1e-9, abs=1e-9, nan_ok=True)


def test_presets_are_verls():
    recorded = json.loads(Path(rollout_presets.__file__).with_suffix(".json").read_text())
    assert {name: asdict(preset(name)) for name in PRESETS.names()} == recorded
    assert preset("bypass_pg_is", rollout_is_threshold=4.0).rollout_is_threshold == 4.0
    with pytest.raises(ValueError, match="did you mean 'decoupled_geo_rs'"):
        preset("decoupled_geors")
    with pytest.raises(ValueError, match="was given threshold; expected fields out of rollout_is,"):
        preset("bypass_pg_is", threshold=4.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold is True"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, "lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": -1}, "positive"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "expected, comma separated, some of token_k1"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, "some of token_k1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold is None; expected one for all"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "one for all, or 3"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "for token_k2 is '1_2'; expected one positive"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "an upper bound of 1 or more"),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "x_2"}, '"lower_upper"'),
    ],
)
def test_what_cannot_work_is_said_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        config_of(config)
