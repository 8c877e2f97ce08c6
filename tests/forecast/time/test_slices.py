"""Slices of a run: cases worked out by hand, and what follows from the definition."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from hpcrl.config.schema import JobConfig, seconds_of
from hpcrl.forecast.time.slices import Division, Slice, clock, divide, order, shortest

HOUR = Slice(length=3600.0, setup=300.0, save=60.0, reserve=300.0)  # 3000 s for steps


def test_forty_steps_in_slices_of_an_hour() -> None:
    """17 steps of 170 s, 17 more, and 6 of them after two whole hours: 7200 + 300 + 1020 + 60 s."""
    assert divide(40, 170.0, HOUR) == Division(slices=3, steps=17, seconds=8580.0)
    assert divide(17, 170.0, HOUR) == Division(1, 17, 300.0 + 17 * 170.0 + 60.0)
    assert divide(3, 1000.0, HOUR) == Division(1, 3, 3360.0)  # the third ends where the reserve begins
    assert divide(1, 3001.0, HOUR) is None


def test_a_run_with_a_longer_step_takes_longer() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        its = replace(HOUR, setup=drawn.uniform(0, 900), save=drawn.uniform(0, 300))
        count, (short, long) = drawn.randint(1, 200), sorted(drawn.uniform(5, 1000) for _ in range(2))
        first, second = divide(count, short, its), divide(count, long, its)
        assert first is not None and second is not None and first.seconds <= second.seconds


def test_the_best_number_of_nodes() -> None:
    """Twice the nodes, 0.6 of the step's time: 17, 29, 49 and 81 steps end within an hour."""
    step = {1: 170.0, 2: 102.0, 4: 61.2, 8: 36.72}

    def best(steps: int | None) -> int:
        return min(step, key=lambda nodes: order(nodes, steps, step[nodes], HOUR))

    assert [best(steps) for steps in (10, 17, 18, 40, 81)] == [1, 1, 2, 4, 8]
    assert best(500) == best(None) == 8  # the most steps
    assert min((4, 8), key=lambda nodes: order(nodes, 500, 900.0, HOUR)) == 4  # as many on either
    assert min((1, 2), key=lambda nodes: order(nodes, 5, 8000.0 / nodes, HOUR)) == 2  # none ends


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, 300 + 40 * 170 + 300),
        (7400, 300 + 40 * 170 + 300),
        (3600, 300 + 14 * 170 + 300),  # three slices, of 14, 14 and 12 steps
        (769, None),
    ],
)
def test_the_shortest_wall_time(limit: float | None, seconds: float | None) -> None:
    found = shortest(40, 170.0, HOUR, limit)
    assert found == seconds
    if found is not None and limit is not None:
        division, at_limit = (divide(40, 170.0, replace(HOUR, length=length)) for length in (found, limit))
        assert division is not None and at_limit is not None and division.slices == at_limit.slices


def test_clock() -> None:
    assert [clock(seconds) for seconds in (1, 3600, 3601, 93784)] == ["00:01:00", "01:00:00", "01:01:00", "1-02:04:00"]
    assert clock(3570.0, 3590.0) == "00:59:50"  # at most the limit
    for seconds in (60, 86400, 123456):
        assert seconds_of(JobConfig(time=clock(seconds)).time) == 60 * math.ceil(seconds / 60)
