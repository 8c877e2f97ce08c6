"""Advantages against numbers that verl 0.9.1 gave (tools/record_cases.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.algorithms import advantage
from tests.algorithms.verl_cases.advantages import CASES, tolerance

RECORDED = np.load(Path(__file__).parent / "verl_cases" / "advantages.npz")


@pytest.mark.parametrize("case", CASES)
def test_verl_gives_the_same(case):
    """On all positions, masked ones too."""
    inputs = CASES[case]
    tensors = {
        name: torch.from_numpy(x) if name != "index" and not isinstance(x, dict) else x
        for name, x in inputs["tensors"].items()
    }
    before = {name: x.copy() for name, x in inputs["tensors"].items()}
    found = advantage(inputs["estimator"], inputs["config"], **tensors)
    for name, ours in zip(("advantages", "returns"), found, strict=True):
        theirs = RECORDED[f"{case}/{name}"]
        assert ours.dtype == tensors["token_level_rewards"].dtype
        error = np.abs(ours.numpy() - theirs) / np.maximum(1, np.abs(theirs))
        assert error.max() <= tolerance(inputs), (name, error.max())
    for name, x in inputs["tensors"].items():
        np.testing.assert_equal(x, before[name])
