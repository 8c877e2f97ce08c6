"""Coefficients from measured times: known ones are found again, and noise gives no negative ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.machine.machine_file import (
    bus_bandwidth,
    fit_line,
    fit_link,
    fit_rate,
    group_sizes,
    ring_bandwidth,
    shared_cores,
)

ROWS = (1, 8, 64, 512, 4096)
MESSAGES = (4, 2**16, 2**20, 2**23)
NOISE = st.lists(st.floats(0.95, 1.05), min_size=5, max_size=5)


@given(st.floats(1e9, 1e15), st.floats(0.1, 1000.0), NOISE)
@settings(max_examples=100, deadline=None)
def test_a_rate_is_found_again(flops: float, half_rows: float, noise: list[float]) -> None:
    def times(factors: list[float]) -> list[float]:
        return [(rows + half_rows) * 2e6 / flops * factor for rows, factor in zip(ROWS, factors, strict=True)]

    assert fit_rate(ROWS, times([1.0] * 5), 2e6) == pytest.approx((flops, half_rows), rel=1e-6)
    found, half = fit_rate(ROWS, times(noise), 2e6)
    assert found == pytest.approx(flops, rel=0.2)
    assert half == pytest.approx(half_rows, rel=0.5, abs=0.5)


def test_half_of_the_rate_is_reached_at_half_rows() -> None:
    flops, half = fit_rate(ROWS, [(rows + 32) * 1e-6 for rows in ROWS], ops_per_row=1e6)
    seconds = (half + half) * 1e6 / flops
    assert half * 1e6 / seconds == pytest.approx(flops / 2)


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_a_link_is_found_again(latency: float, bandwidth: float) -> None:
    times = [latency + size / bandwidth for size in MESSAGES]
    assert fit_link(MESSAGES, times) == pytest.approx((latency, bandwidth), rel=1e-3)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5))
def test_coefficients_are_not_negative(seconds: list[float]) -> None:
    intercept, slope = fit_line(ROWS[: len(seconds)], seconds)
    assert intercept >= 0 and slope >= 0 and math.isfinite(intercept + slope)
    flops, half_rows = fit_rate(ROWS[: len(seconds)], seconds, 1.0)
    assert 0 < flops < math.inf and 0 <= half_rows < math.inf
    latency, bandwidth = fit_link(ROWS[: len(seconds)], seconds)
    assert latency >= 0 and 0 < bandwidth < math.inf


def test_an_impossible_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="positive times"):
        fit_line([1, 2], [1.0, 0.0])


def test_bus_bandwidth_by_hand() -> None:
    """4 ranks: each sends 3/4 of the bytes in a reduce-scatter, and again in an all-gather."""
    assert bus_bandwidth(4, 1000, 0.5) == 3000
    assert bus_bandwidth(1, 1000, 0.5) == 0


def test_groups_are_powers_of_two_and_the_job() -> None:
    assert [group_sizes(ranks) for ranks in (1, 2, 6, 8)] == [[], [2], [2, 4, 6], [2, 4, 8]]


def test_four_ranks_on_two_cores_have_two() -> None:
    assert shared_cores(10.0, [5.0, 5.0, 5.0, 5.0]) == 2
    assert shared_cores(10.0, [10.5, 10.5]) == 2, "no more than there are ranks"


def test_a_ring_between_nodes_has_a_link_of_each_rank_of_a_node() -> None:
    nodes = ([0, 1, 2, 3], [4, 5, 6, 7])

    def bandwidth(size: int, has_rings: bool) -> float:
        return ring_bandwidth(size, nodes, inside=90.0, between=25.0, has_rings=has_rings)

    assert bandwidth(4, True) == bandwidth(2, False) == 90
    assert bandwidth(8, True) == 90, "4 rings of 25, limited by what is inside a node"
    assert bandwidth(6, True) == 50, "2 ranks on the node with the fewest"
    assert bandwidth(5, True) == bandwidth(8, False) == 25
