"""How a check ends that does not pass."""

from __future__ import annotations


class Skip(Exception):
    """Says what the machine lacks. Raised inside a check by all ranks or by none."""


class Failed(Exception):
    """Says what was found and what was expected."""


def require(true: bool, line: str) -> None:
    if not true:
        raise Failed(line)
