"""Which numbers of a step and of its replay agree, and how a difference is named."""

from __future__ import annotations

import math

import pytest

from hpcrl.observe.read.agreement import Agreement, compare_metrics

LOGGED = {"actor/grad_norm": 2.0, "actor/lr": 1e-6, "actor/pg_loss": 1e-9, "actor/x": math.nan, "timing_s/step": 1.0}


def compared(rtol: float = 1e-5, **changed: float | None) -> Agreement:
    found = Agreement(7, rtol)
    values = {**LOGGED, **{f"actor/{name}": value for name, value in changed.items()}}
    compare_metrics(LOGGED, {name: value for name, value in values.items() if value is not None}, found)
    return found


def test_equal_numbers_agree_bit_for_bit_and_times_do_not_count() -> None:
    found = Agreement(7, 0.0)
    compare_metrics(LOGGED, {**LOGGED, "timing_s/step": 2.0, "actor/of_a_later_version": 1.0}, found)
    assert str(found) == "step 7: 4 metrics agree bit for bit"


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [
        ({"grad_norm": 2.0 * (1 + 9e-6)}, True),
        ({"grad_norm": 2.0 * (1 + 2e-5)}, False),
        ({"pg_loss": 9e-6}, True),  # a mean of terms of size 1
        ({"lr": 1.1e-6}, False),  # a number that is set
        ({"x": 0.0}, False),
        ({"pg_loss": math.inf}, False),
        ({"pg_loss": None}, False),
    ],
)
def test_rounding_is_relative_to_the_terms(changed: dict[str, float | None], agrees: bool) -> None:
    found = compared(**changed)
    assert found.agrees is agrees and not found.is_bitwise
    assert not compared(0.0, **changed).agrees


def test_the_first_difference_is_named_with_both_values() -> None:
    found = compared(lr=2e-6, pg_loss=None)
    assert str(found) == (
        "step 7: 2 of 4 metrics differ by more than 1e-05; the first is actor/lr: the run has 1e-06, the replay 2e-06"
    )
    assert str(compared(pg_loss=None)).endswith("actor/pg_loss: the run has 1e-09, the replay nothing")
