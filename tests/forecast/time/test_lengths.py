"""Distributions of lengths against enumeration of all draws."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest

from hpcrl.forecast.time.lengths import Lengths, spread

SOME = Lengths((3, 5), (1, 4, 4, 10))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_longest_is_the_mean_over_all_draws(count: int) -> None:
    draws = itertools.product(SOME.responses, repeat=count)
    assert SOME.longest(count) == pytest.approx(fmean(map(max, draws)))


def test_moments_are_those_of_all_sequences() -> None:
    pairs = list(itertools.product(SOME.prompts, SOME.responses))
    assert SOME.mean == fmean(prompt + response for prompt, response in pairs)
    assert SOME.pairs == pytest.approx(fmean((p + r) * (p + r + 1) / 2 for p, r in pairs))
    assert SOME.cached == pytest.approx(fmean(sum(p + token for token in range(1, r + 1)) for p, r in pairs))


def test_log_normal() -> None:
    free, cut = (Lengths.log_normal(8, 500, 0.6, longest) for longest in (100_000, 600))
    assert free.response == pytest.approx(500, rel=0.01)
    assert cut.responses[-1] == 600
    assert cut.response < free.response
    assert Lengths.log_normal(8, 500, 0.0, 600) == Lengths((8,), (500,) * len(cut.responses))
    assert free.longest(4096) > free.longest(64) > free.response


def test_quantiles_keep_the_distribution() -> None:
    free = Lengths.log_normal(8, 500, 0.6, 100_000)
    assert fmean(free.drawn(64)) == pytest.approx(500, rel=0.02)
    assert Lengths.of_samples([7, 3], [9, 0, 5]) == Lengths((3, 7), (1, 5, 9))
    assert sorted(spread(100)) == list(range(100))


@pytest.mark.parametrize("wrong", [((), (1,)), ((1,), (2, 1)), ((1,), (0, 1))])
def test_wrong_lengths(wrong: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="found .*; (expected|use)"):
        Lengths(*wrong)
