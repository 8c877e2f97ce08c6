"""What rules accept as a ground truth: each is declared with its scorer, and read by one of the functions here."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Score = TypeVar("Score")
Reader = Callable[[Any], Any]  # returns what the scorer gets; ValueError says what it expects


def reads(reader: Reader) -> Callable[[Callable[..., Score]], Callable[..., Score]]:
    """Give the decorated scorer what `reader` returns for its ground truth, and keep it as the attribute `reader`."""

    def decorate(scorer: Callable[..., Score]) -> Callable[..., Score]:
        @wraps(scorer)
        def scored(data_source: str, solution_str: str, ground_truth: Any, *args: Any, **options: Any) -> Score:
            return scorer(data_source, solution_str, reader(ground_truth), *args, **options)

        scored.reader = reader  # type: ignore[attr-defined]
        return scored

    return decorate


def as_text(value: Any) -> str:
    """Text, or an integer as text."""
    if is_integer(value):
        return str(value)
    if not isinstance(value, str):
        raise ValueError("expected text, or an integer")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair; expected Unicode text") from None
    return value


def as_text_or_number(value: Any) -> str:
    """Text, or a number as text."""
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    try:
        return as_text(value)
    except ValueError:
        raise ValueError("expected text, or a finite number") from None


def as_texts(value: Any) -> list[str]:
    """A text, or several; integers as text."""
    try:
        found = [as_text(it) for it in (value if isinstance(value, list) else [value])]
    except ValueError:
        found = []
    if not found:
        raise ValueError("expected a text, or a list of them that is not empty")
    return found


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """An integer, or a float of the same value, as pandas writes integers beside missing ones."""
    return is_integer(value) or (isinstance(value, float) and value.is_integer())
