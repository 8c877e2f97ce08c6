"""Countdown: make the target from the given numbers, each used exactly once.

The answer is `<a>...</a>` and nothing else (short form), or the last `<answer>...</answer>` of a response that may have
thoughts before it (chat form).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hpcrl.rewards.registry import is_whole, reads
from hpcrl.rewards.scorers import limits
from hpcrl.rewards.scorers.short_answers import OPEN, last_answer

MAX_LENGTH = 512  # characters; bounds the work: a product of so many digits is still a small number
MAX_DEPTH = 64  # nested parentheses; bounds the recursion
DIGITS = "0123456789"  # not str.isdigit, which is true of digits in every script and of superscripts


class ExpressionError(ValueError):
    """The text is not an expression of this grammar."""


@dataclass(frozen=True)
class Evaluation:
    """`value` is None where the expression divides by zero; `numbers` are the literals from left to right."""

    value: Fraction | None
    numbers: tuple[int, ...]


def evaluate(text: str, *, signs: bool = False) -> Evaluation:
    """Parses all of `text`; raises ExpressionError where it does not follow the grammar.

    sum = product (("+" | "-") product)*; product = atom (("*" | "/") atom)*; atom = number | "(" sum ")";
    number = ASCII digits. There is no white space. With `signs` an atom may also be ("+" | "-") atom.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters; at most {MAX_LENGTH}")
    parser = _Parser(text, signs)
    value = parser.sum(depth=0)
    if parser.place != len(text):
        raise ExpressionError(f"{text[parser.place]!r} at {parser.place}; expected an operator or the end")
    return Evaluation(value, tuple(parser.numbers))


@dataclass
class _Parser:
    """Recursive descent; each method reads one rule of the grammar from `place` on and returns its value."""

    text: str
    signs: bool
    place: int = 0
    numbers: list[int] = field(default_factory=list)

    def sum(self, depth: int) -> Fraction | None:
        value = self.product(depth)
        while operator := self.accept("+-"):
            right = self.product(depth)
            if value is None or right is None:
                value = None
            else:
                value = value + right if operator == "+" else value - right
        return value

    def product(self, depth: int) -> Fraction | None:
        value = self.atom(depth)
        while operator := self.accept("*/"):
            right = self.atom(depth)
            if value is None or right is None or (operator == "/" and right == 0):
                value = None
            else:
                value = value * right if operator == "*" else value / right
        return value

    def atom(self, depth: int) -> Fraction | None:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        if self.signs and (sign := self.accept("+-")):
            value = self.atom(depth + 1)
            return -value if sign == "-" and value is not None else value
        if self.accept("("):
            value = self.sum(depth + 1)
            if not self.accept(")"):
                raise ExpressionError(f"no ')' at {self.place}")
            return value
        start = self.place
        while self.accept(DIGITS):
            pass
        if self.place == start:
            raise ExpressionError(f"no number at {start}")
        self.numbers.append(int(self.text[start : self.place]))
        return Fraction(self.numbers[-1])

    def accept(self, characters: str) -> str:
        """Moves past the next character and returns it, if it is one of these; otherwise returns ""."""
        if self.place < len(self.text) and self.text[self.place] in characters:
            self.place += 1
            return self.text[self.place - 1]
        return ""


# `fullmatch`, not `$`, which would allow a newline at the end.
SHORT_ANSWER = re.compile(r"<a>([0-9+\-*/()]+)</a>")
AROUND_SIGNS = re.compile(r"\s*([-+*/()])\s*")  # white space between two digits stays, and does not parse


def puzzle(value: Any) -> dict[str, Any]:
    """{"numbers": whole numbers, "target": a whole number}."""
    try:
        if value["numbers"] and all(map(is_whole, [*value["numbers"], value["target"]])):
            return value
    except (TypeError, KeyError):
        pass
    raise ValueError("expected {numbers: a list of integers, target: an integer}")


@reads(puzzle)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    **_: Any,
) -> dict[str, Any]:
    """1 for a right answer, `format_score` for a wrong one in the right format, 0 otherwise; `acc` is 1 or 0.

    `format` is 1 where the format is right: the other part of the reward, for gdpo. A response with `<answer>` is in
    the chat form; its format is a complete pair of tags, whatever is in them. In the short form tags and expression
    have to parse, and a response that did not end by itself scores 0: that is one whose `extra_info["finish_reason"]`
    is there and is not "stop" (RewardManager puts it there).
    """
    target, numbers = ground_truth["target"], Counter(ground_truth["numbers"])
    if OPEN in solution_str:
        answer = last_answer(solution_str)
        evaluation = None if answer is None else evaluate_chat(answer)
        formatted = answer is not None
    else:
        finish_reason = (extra_info or {}).get("finish_reason", "stop")
        short = SHORT_ANSWER.fullmatch(solution_str) if finish_reason == "stop" else None
        answer = short[1] if short else None
        evaluation = None if answer is None else evaluation_or_none(answer)
        formatted = evaluation is not None
    right = evaluation is not None and evaluation.value == target and Counter(evaluation.numbers) == numbers
    scored = {"score": 1.0 if right else format_score * formatted, "acc": float(right), "format": float(formatted)}
    return limits.marked(scored, answer, MAX_LENGTH, MAX_DEPTH) if evaluation is None else scored


def evaluate_chat(answer: str) -> Evaluation | None:
    """What is between the tags of a chat answer: white space and signs in front of numbers are allowed there."""
    if len(answer) > MAX_LENGTH:
        return None
    return evaluation_or_none(AROUND_SIGNS.sub(r"\1", answer), signs=True)


def evaluation_or_none(text: str, *, signs: bool = False) -> Evaluation | None:
    try:
        return evaluate(text, signs=signs)
    except ExpressionError:
        return None
