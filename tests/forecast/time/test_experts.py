"""Uneven loads of experts: of expert-parallel ranks, and of a run's metrics."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.forecast.time.layers import LOAD_METRIC, with_measured_load
from hpcrl.model.blocks.mixture import fullest_rank, most_of
from tests.forecast.memory.shapes import MOE
from tests.forecast.time.test_passes import micro, model
from tests.run.test_predicted import config


def test_tokens_that_choose_at_random() -> None:
    assert most_of(1, 100) == 1.0
    assert 1.0 < most_of(8, 1e6) < most_of(8, 1e3) < most_of(8, 10) <= 8.0


@pytest.mark.parametrize(("num_experts", "ranks"), [(8, 2), (8, 4), (64, 8), (64, 64), (128, 16)])
def test_the_fullest_rank_is_that_of_drawn_loads(num_experts: int, ranks: int) -> None:
    loads = np.random.default_rng(0).normal(1.0, 0.2, (20_000, num_experts))
    loads /= loads.mean(1, keepdims=True)
    imbalance = loads.max(1).mean()
    of_ranks = loads.reshape(len(loads), ranks, -1).mean(2).max(1).mean()
    assert fullest_rank(ranks, num_experts, imbalance) - 1 == pytest.approx(of_ranks - 1, rel=0.06)


def test_the_fullest_rank_of_routers_as_initialised() -> None:
    """Counted in an optimizer step of the model of tools/layout_cases.py: 2.36, 1.66 and 1.13; 2.69, 1.78 and 1.24."""
    for of_expert, of_four, of_two in ((2.36, 1.66, 1.13), (2.69, 1.78, 1.24)):
        assert fullest_rank(4, 8, of_expert) == pytest.approx(of_four, rel=0.15)
        assert fullest_rank(2, 8, of_expert) == pytest.approx(of_two, rel=0.15)
    assert fullest_rank(8, 8, 2.5) == pytest.approx(2.5) and fullest_rank(1, 8, 2.5) == 1.0
    assert fullest_rank(4, 8, 8.0) == 4.0, "one expert has all tokens"


def test_only_ranks_that_divide_experts_wait_for_the_fullest_one() -> None:
    for layout, waits in (({}, False), ({"ep": 2}, True)):
        even, uneven = (model(MOE, 2, layout=layout, load_imbalance=load).training(micro())[0] for load in (1.0, 2.0))
        assert (uneven.waiting > even.waiting) == waits
        assert uneven.products == pytest.approx(even.products)


def test_a_runs_load_is_that_of_its_metrics() -> None:
    assert with_measured_load(config(), {LOAD_METRIC: 1.84}).model.moe.load_imbalance == 1.8
    assert with_measured_load(config(), {LOAD_METRIC: 0.99}).model.moe.load_imbalance == 1.0
    assert with_measured_load(config(), {LOAD_METRIC: float("nan")}) == with_measured_load(config(), {}) == config()
