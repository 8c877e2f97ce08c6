"""Validation metrics: verl's numbers, what they mean by hand, and that they are there in seconds."""

from __future__ import annotations

import json
import math
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from hpcrl.run.validation import (
    Block,
    bootstrap_draws,
    majority,
    metric_tags,
    numbers_drawn,
    validation_metrics,
)

FAMILY = Path(__file__).parent / "verl_cases" / "validation.py"
CASES = runpy.run_path(str(FAMILY))["CASES"]
RECORDED = json.loads(FAMILY.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_names_are_verls(case: str) -> None:
    found = validation_metrics(**CASES[case])
    assert found.keys() == RECORDED[case]["found"].keys()
    tags = metric_tags(found)
    wanted = RECORDED[case]["tags"]
    assert tags.keys() == wanted.keys()
    for tag, value in wanted.items():
        assert math.isclose(tags[tag], value, rel_tol=1e-10, abs_tol=1e-10), tag


def test_by_hand() -> None:
    """One prompt, right in one of two samples: a draw of two has a right one with probability 3/4."""
    found = validation_metrics(["s", "s"], ["p", "p"], {"acc": [1.0, 0.0], "pred": ["a", "b"]})["s"]["acc"]
    assert found["mean@2"] == found["std@2"] == 0.5
    assert abs(found["best@2/mean"] - 0.75) < 0.05
    assert abs(found["worst@2/mean"] - 0.25) < 0.05
    # A tie of two votes goes to the first drawn, so either answer wins half of the time.
    assert abs(found["maj@2/mean"] - 0.5) < 0.05
    assert found["best@2/std"] == pytest.approx(math.sqrt(found["best@2/mean"] * (1 - found["best@2/mean"])))


def test_majority_takes_the_first_drawn_of_the_commonest() -> None:
    votes = np.array([[0, 1, 1, 2], [0, 0, 0, 0]])
    draws = np.array([[0, 1, 2, 3], [3, 0, 2, 2], [3, 0, 0, 3], [2, 1, 0, 0]])
    assert majority(votes, draws).tolist() == [[1, 2, 3, 2], [0, 3, 3, 2]]


@pytest.mark.parametrize(("count", "numbers"), [(1, []), (2, [2]), (4, [2, 4]), (5, [2, 4, 5]), (8, [2, 4, 8])])
def test_numbers_drawn(count: int, numbers: list[int]) -> None:
    assert numbers_drawn(count) == numbers


def test_failed_scores_count_as_wrong_only_where_there_is_an_accuracy() -> None:
    found = validation_metrics(
        ["a", "a", "b", "b"], [0, 0, 1, 1], {"reward": [1.0, 0.0, 0.5, 0.0], "acc": [1.0, None, None, None]}
    )
    assert found["a"]["acc"]["mean@2"] == 0.5
    assert found["a"]["acc_success_only"] == {"mean@1": 1.0}
    assert found["b"].keys() == {"reward"}
    assert "val-core/b/reward/mean@2" in metric_tags(found)
    assert "val-aux/a/reward/mean@2" in metric_tags(found)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    block = Block(("x", "y"), draw.normal(size=(2, 7, 6)), draw.integers(0, 3, (7, 6)))
    whole = block.metrics()
    monkeypatch.setattr("hpcrl.run.validation.CHUNK", 1)
    for name, values in block.metrics().items():
        assert np.array_equal(values, whole[name]), name


def test_draws_do_not_touch_numpys_global_generator() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    bootstrap_draws.cache_clear()
    bootstrap_draws(5, 3)
    assert np.random.get_state()[1].tolist() == before


def test_a_thousand_prompts_take_seconds() -> None:
    """verl's loops need minutes for these."""
    prompts, n = 1000, 8
    draw = np.random.default_rng(0)
    start = time.process_time()
    validation_metrics(
        ["s"] * (prompts * n),
        np.repeat(np.arange(prompts), n).tolist(),
        {
            "reward": draw.normal(size=prompts * n).tolist(),
            "acc": draw.integers(0, 2, prompts * n).astype(float).tolist(),
            "pred": [str(x) for x in draw.integers(0, 5, prompts * n)],
        },
    )
    assert time.process_time() - start < 20
