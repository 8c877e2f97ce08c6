"""Limits of an answer before a rule parses it, or hands it to a library: length, depth, size of numbers, seconds."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

STOPPED = "stopped"  # in a rule's result: the count under `reward/` that the answer belongs to
OPENING, CLOSING = frozenset("([{"), frozenset(")]}")
DIGITS = 16  # of a number whose size is not taken from its length
LARGEST = 64.0  # log2 of an exponent; a larger one is as large
TOKEN = re.compile(r"\\?[()\[\]{}]|\\[a-zA-Z]+|\\.|\d+(?:[,.]\d+)*|\*\*|!!?|\s+|.", re.DOTALL)
NO_FACTORS = {"\\left", "\\right", "\\cdot", "\\times", "\\,", "\\;", "\\!", "*", "_", "'"}
SUMS = {"+", "-", "=", "<", ">", ",", ";", "&", "\\\\", "\\pm", "\\le", "\\ge", "\\in", "\\cup", "\\cap"}


class OverLimits(BaseException):
    """The answer is longer, deeper or larger than the rule allows.

    A BaseException, because math-verify and sympy catch each Exception and try the next way.
    """


class OutOfTime(BaseException):
    """The answer has taken all the seconds that the rule allows."""


def stopped(count: str) -> dict[str, Any]:
    """The result of a rule for an answer that a limit has stopped.

    Args:
        count: "over_limits" or "timeouts".
    """
    return {"score": 0.0, "acc": 0.0, STOPPED: count}


Result = TypeVar("Result", float, dict[str, Any])


def marked(result: Result, answer: str | None, max_length: int, max_depth: int) -> Result | dict[str, Any]:
    """The result of a wrong answer; if its value was not compared, because it is beyond the limits, it is counted."""
    if answer is None or not is_over(answer, max_length, max_depth):
        return result
    scored = result if isinstance(result, dict) else {"score": result, "acc": result}
    return scored | {STOPPED: "over_limits"}


def is_over(text: str, max_length: int, max_depth: int) -> bool:
    return len(text) > max_length or depth(text) > max_depth


def depth(text: str) -> int:
    """How deep brackets of all kinds are nested."""
    deepest = level = 0
    for character in text:
        if character in OPENING:
            level += 1
            deepest = max(deepest, level)
        elif character in CLOSING:
            level = max(level - 1, 0)
    return deepest


def check(text: str, max_length: int, max_depth: int, max_bits: float) -> None:
    """Raise OverLimits for a text that is too long or too deep, or a value in it that might have more bits."""
    if is_over(text, max_length, max_depth):
        raise OverLimits(f"more than {max_length} characters, or nested deeper than {max_depth}")
    tokens = [token for token in TOKEN.findall(text) if not token.isspace()]
    tokens.reverse()
    while tokens:
        _bits(tokens, max_bits)


def _bits(tokens: list[str], most: float) -> float:
    r"""log2 of a bound of the size of the LaTeX expression up to its closing bracket; a letter counts as 2.

    Of sums it is the largest term, and of all else that stands side by side the product. OverLimits where a part of
    it is larger than `most`.
    """
    largest = term = 0.0
    num_terms = 1
    while tokens:
        if tokens[-1][-1] in CLOSING:
            tokens.pop()
            break
        if tokens[-1] in SUMS:
            tokens.pop()
            largest, term, num_terms = max(largest, term), 0.0, num_terms + 1
            continue
        term += _power(tokens, most)
        if term > most:
            raise OverLimits(f"a number of more than {most:g} bits")
    return max(largest, term) + math.log2(num_terms)


def _power(tokens: list[str], most: float) -> float:
    """An item, with the signs of factorials and the exponents that follow it."""
    bits = _item(tokens, most)
    while tokens and tokens[-1][0] == "!":
        tokens.pop()
        bits = 2 ** min(bits, LARGEST) * max(bits, 1.0)
    if tokens and tokens[-1] in ("^", "**"):
        tokens.pop()
        bits = max(bits, 0.0) * 2 ** min(_power(tokens, most) if tokens else 0.0, LARGEST)
    if bits > most:
        raise OverLimits(f"a number of more than {most:g} bits")
    return bits


def _item(tokens: list[str], most: float) -> float:
    token = tokens.pop()
    if token[-1] in OPENING:
        return _bits(tokens, most)
    if token[0].isdigit():
        token = token.replace(",", "").partition(".")[0]
        return math.log2(int(token) or 1) if len(token) < DIGITS and token.isascii() else len(token) * math.log2(10)
    if token in NO_FACTORS:
        return 0.0
    if token in (r"\binom", r"\dbinom", r"\tbinom"):
        chosen = _power(tokens, most) if tokens else 0.0
        return 2 ** min(chosen, LARGEST)
    return 0.0 if len(token) > 1 else 1.0


@contextmanager
def cpu_seconds(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body when it has used these seconds of CPU time, whatever else the machine is doing.

    In the main thread only, and not within a function in C that takes long. Raises ValueError in other threads.
    """

    def stop(*_: object) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again, where the body has caught it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
