"""Values of expressions as people write them, and bounds on what they cost."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rewards.scorers.algebra import MAX_DEPTH, NotAnExpression, equal, value


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("2sqrt(3)", "sqrt(12)"),
        ("1/2x", "x/2"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("2**-1", ".5"),
        ("(x+y)(x-y)", "x**2-y**2"),
        ("xy", "y*x"),
        ("2pi", "pi+pi"),
        ("4!/3!", "4"),
        ("6!!", "48"),
        ("1/sqrt(2)", "sqrt(2)/2"),
        ("sqrt(4x)", "2sqrt(x)"),
    ],
)
def test_equal(left: str, right: str) -> None:
    assert equal(left, right) and equal(right, left)
    assert not equal(left, right + "+1")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1.41421356237309504880", "sqrt(2)"),  # not to 45 digits
        ("0.3333333333333333", "1/3"),
        ("sqrt(x**2)", "x"),  # not where x is negative
        ("xy", "x+y"),
        ("1/0", "1/0"),  # no value
        ("sqrt(-1)", "sqrt(-1)"),
        ("9**9**9", "9**9**9"),  # too large
        ("2 3", "6"),
        ("()", "()"),
        ("x(", "x("),
    ],
)
def test_not_equal(left: str, right: str) -> None:
    assert not equal(left, right)


def test_nesting_is_bounded() -> None:
    assert value("(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1)) == Decimal(1)
    for text in ("(" * 150 + "1" + ")" * 150, "-" * 300 + "1", "(" * 10**6, "2**" * 130 + "1"):
        with pytest.raises(NotAnExpression):
            value(text)


@given(st.text(alphabet="0123456789.+-*/()!xy sqrtpi", max_size=60))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    try:
        assert value(text).is_finite()
    except (NotAnExpression, ArithmeticError):
        pass
