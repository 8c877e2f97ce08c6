"""PF-PPO: whom it draws, and how often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcrl.algorithms.pf_ppo import PfPpo, pf_ppo_rows, pf_ppo_weights
from tests.algorithms.verl_cases.pf_ppo import CASES

RECORDED = np.load(Path(__file__).parent / "verl_cases" / "pf_ppo.npz")


def weights_of(scores, method="pow", weight_pow=2.0):
    return pf_ppo_weights(scores, PfPpo(method, weight_pow))


@pytest.mark.parametrize("case", CASES)
def test_verl_draws_with_the_same_weights(case):
    np.testing.assert_allclose(weights_of(**CASES[case]), RECORDED[f"{case}/weights"], rtol=1e-6, atol=0)


def test_rows_by_hand():
    """Weights 1, 4, 0, 4 of 9: shares end at 1/9, 5/9, 5/9, 1."""
    scores, uniforms = np.array([1.0, -2.0, 0.0, 2.0]), np.array([0.1, 0.2, 0.55, 0.56])
    assert pf_ppo_rows(scores, uniforms, PfPpo()).tolist() == [0, 1, 1, 3]
    assert pf_ppo_rows(scores, uniforms, PfPpo("max_min")).tolist() == [1, 1, 3, 3]


def test_each_is_drawn_as_often_as_its_weight_says():
    scores = np.tile([1.0, 2.0, 3.0, 0.0], 5000)
    uniforms = np.random.Generator(np.random.Philox(key=1)).random(len(scores))
    rows = pf_ppo_rows(scores, uniforms, PfPpo())
    share = np.bincount(rows % 4, minlength=4) / len(scores)
    np.testing.assert_allclose(share, np.array([1, 4, 9, 0]) / 14, atol=0.015)
    assert np.array_equal(rows, pf_ppo_rows(scores, uniforms, PfPpo()))
    last = np.full(4, np.nextafter(1.0, 0.0))
    assert pf_ppo_rows(np.array([1.0, 1.0, 1.0, 0.0]), last, PfPpo()).max() <= 3


def test_scores_that_are_all_zero_are_drawn_evenly():
    rows = pf_ppo_rows(np.zeros(4), np.array([0.1, 0.3, 0.6, 0.9]), PfPpo())
    assert rows.tolist() == [0, 1, 2, 3]
    assert pf_ppo_rows(np.zeros(0), np.zeros(0), PfPpo()).tolist() == []


def test_what_it_refuses():
    with pytest.raises(ValueError, match="need finite scores"):
        pf_ppo_weights(np.array([1.0, np.nan]), PfPpo())
    with pytest.raises(ValueError, match=r"\(3,\) uniforms for \(2,\) scores"):
        pf_ppo_rows(np.ones(2), np.ones(3), PfPpo())
