"""Matrices of cases: those in which every pair of values meets run always, all others under --exhaustive."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Mapping[str, Any] | Sequence[Any]


def covering(seldom: Iterable[Any] = (), /, **axes: Axis) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the product of the axes.

    Cases are chosen greedily, each for the most pairs of values that no chosen case has; the cases that are not chosen
    have the marker `exhaustive`. Faults that need three particular values at once are left to --exhaustive.

    Args:
        seldom: keys of values that are too slow for every run; their cases have the marker `slow`.
        axes: values by argument name; a mapping's keys, or str of a sequence's values, are the ids.
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()]
    cases = list(itertools.product(*named))
    chosen = set(choose(cases))
    slow = set(seldom)

    def marks(case: tuple[str, ...]) -> list[pytest.MarkDecorator]:
        if case not in chosen:
            return [pytest.mark.exhaustive]
        return [pytest.mark.slow] if slow.intersection(case) else []

    def values(case: tuple[str, ...]) -> Iterable[Any]:
        return (axis[key] for axis, key in zip(named, case, strict=True))

    params = [pytest.param(*values(case), id="-".join(case), marks=marks(case)) for case in cases]
    return pytest.mark.parametrize(tuple(axes), params)


def slow_but(usual: Any, names: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, or `pytest.param` of them: all but the usual one are marked `slow`."""
    params = [name if isinstance(name, type(pytest.param())) else pytest.param(name) for name in names]
    return [
        param if param.values[0] == usual else pytest.param(*param.values, marks=[*param.marks, pytest.mark.slow])
        for param in params
    ]


def choose(cases: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cases in which every pair of values meets that meets in any case; of equally good ones the first."""
    met: set[tuple[tuple[int, str], ...]] = set()
    chosen = []
    while new := max(cases, key=lambda case: len(pairs(case) - met)):
        if pairs(new) <= met:
            return chosen
        chosen.append(new)
        met |= pairs(new)
    return chosen


def pairs(case: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(case), min(2, len(case))))
