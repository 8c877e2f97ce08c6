"""The parser agrees with exact arithmetic and survives what a policy may write."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rewards.scorers.countdown import MAX_DEPTH, MAX_LENGTH, ExpressionError, evaluate

# An expression as (text, value or None, numbers, binding): binding 2 atom, 1 product, 0 sum.
Node = tuple[str, Fraction | None, tuple[int, ...], int]


def _number(value: int) -> Node:
    return str(value), Fraction(value), (value,), 2


def _combine(left: Node, operator: str, right: Node) -> Node:
    """The node of `left operator right`, with parentheses only where precedence needs them."""
    binding = 0 if operator in "+-" else 1

    def wrapped(node: Node, needs: int) -> str:
        return node[0] if node[3] >= needs else f"({node[0]})"

    value: Fraction | None = None
    a, b = left[1], right[1]
    if a is not None and b is not None and not (operator == "/" and b == 0):
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    text = wrapped(left, binding) + operator + wrapped(right, binding + 1)
    return text, value, left[2] + right[2], binding


expressions = st.recursive(
    st.integers(0, 99).map(_number),
    lambda inner: st.builds(_combine, inner, st.sampled_from("+-*/"), inner),
    max_leaves=12,
)


@given(expressions)
def test_value_and_numbers_are_those_of_the_tree(node: Node) -> None:
    text, value, numbers, _ = node
    found = evaluate(text)
    assert (found.value, found.numbers) == (value, numbers)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8-3-2", 3),
        ("8/4/2", 1),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("1/3*3", 1),
        ("((7))", 7),
        ("7/(3-3)+1", None),
        ("08", 8),
    ],
)
def test_hand_cases(text: str, value: int | None) -> None:
    assert evaluate(text).value == value


@pytest.mark.parametrize(
    "text",
    ["", "+", "1+", "-1", "1--1", "1 + 2", "(1", "1)", "()", "2(3)", "(2)3", "1.5", "2**3", "2//3", "1e3", "0x10", "a",
     "1\n", "\u0663+\u0664", "\u00b2", "\uff11", "1_000", "__import__('os')", "1+\x00"],
)  # fmt: skip
def test_what_is_not_an_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_nesting_is_bounded_not_recursed() -> None:
    depth = MAX_DEPTH
    assert evaluate("(" * depth + "1" + ")" * depth).value == 1
    for text in ("(" * (depth + 1) + "1" + ")" * (depth + 1), "(" * MAX_LENGTH, "(" * 1_000_000):
        with pytest.raises(ExpressionError):
            evaluate(text)


def test_huge_numbers_are_bounded() -> None:
    assert evaluate("9" * MAX_LENGTH).value == 10**MAX_LENGTH - 1
    assert evaluate("*".join(["99"] * 170)).value == 99**170
    with pytest.raises(ExpressionError):
        evaluate("9" * 100_000)


@given(st.text(alphabet="0123456789+-*/()", max_size=MAX_LENGTH + 5))
def test_any_text_of_the_alphabet_parses_or_is_refused(text: str) -> None:
    try:
        evaluate(text)
    except ExpressionError:
        pass
