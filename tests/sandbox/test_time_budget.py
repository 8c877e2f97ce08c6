"""What the requests of a batch take together stays within its time, and each keeps its share."""

from __future__ import annotations

import pytest

from hpcrl.sandbox.process_pool import TimeBudget


def limits_of(budget: TimeBudget, timeout: float, needed: list[float]) -> list[float]:
    """The limits of requests that one worker runs in turn; each takes the seconds it needs, or its limit."""
    budget.renew(timeout * len(needed))
    found = []
    for place, seconds in enumerate(needed):
        found.append(budget.take(timeout, timeout * (len(needed) - place - 1)))
        budget.give_back(max(0.0, found[-1] - seconds))
    return found


@pytest.mark.parametrize(("seconds", "total"), [(700.0, 700.0), (None, 512 * 10 / 4)])
def test_a_batch_that_sleeps_ends_in_its_time(seconds: float | None, total: float) -> None:
    limits = limits_of(TimeBudget(seconds, 1, "time"), 10.0, [float("inf")] * 512)
    assert sum(limits) == pytest.approx(total)
    assert limits[:15] == [10.0] * 15 and min(limits) == pytest.approx(0.75 * total / 512)


def test_a_batch_with_few_slow_requests_has_whole_timeouts() -> None:
    needed = [float("inf") if place % 10 == 0 else 0.3 for place in range(512)]
    assert limits_of(TimeBudget(None, 1, "time"), 10.0, needed) == [10.0] * 512


def test_small_batches_have_whole_timeouts() -> None:
    assert limits_of(TimeBudget(None, 2, "time"), 10.0, [float("inf")] * 64) == [10.0] * 64


def test_slow_requests_before_the_others_leave_these_their_share() -> None:
    limits = limits_of(TimeBudget(60.0, 1, "time"), 10.0, [float("inf")] * 300 + [0.02] * 300)
    assert min(limits) == pytest.approx(0.75 * 60 / 600)
    assert limits[-1] > 1.0  # of what the others have given back


def test_starts_of_processes_are_charged_and_take_no_shares() -> None:
    budget = TimeBudget(60.0, 1, "time")
    budget.renew(10.0 * 60)
    limits = []
    for others in reversed(range(60)):
        limits.append(budget.take(10.0, 10.0 * others))
        budget.charge(0.2)
    assert limits[0] == 10.0 and limits[-1] == pytest.approx(0.75)
    assert sum(limits) + 60 * 0.2 <= 60.0 + 59 * 0.2
    assert budget.left_for(10.0, 0.0) == 0.0


def test_second_chances_share_what_is_left() -> None:
    budget = TimeBudget(40.0, 1, "time")
    limits_of(budget, 10.0, [0.0] * 8)
    assert [budget.take_again(10.0, others) for others in (70.0, 60.0, 0.0)] == pytest.approx([5.0, 5.0, 10.0])
    assert budget.left_for(10.0, 30.0) == pytest.approx(5.0)
