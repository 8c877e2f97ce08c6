"""Distributions of prompt and response lengths, as equally likely samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist, fmean

QUANTILES = 1024  # samples that stand for a distribution


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, ascending; each sample of a distribution is equally likely, and a response's length does not
    depend on its prompt's. A response has at least one token."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    def __post_init__(self) -> None:
        are_ascending = all(list(each) == sorted(each) for each in (self.prompts, self.responses))
        if not self.prompts or not self.responses or not are_ascending or self.prompts[0] < 0 or self.responses[0] < 1:
            raise ValueError("found no lengths, or not ascending or negative ones; use Lengths.of_samples")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.prompts, self.responses))

    @classmethod
    def fixed(cls, prompt: int, response: int) -> Lengths:
        """All of one length."""
        return cls((prompt,), (response,))

    @classmethod
    def log_normal(cls, prompt: int, mean: float, sigma: float, longest: int) -> Lengths:
        """Responses whose logarithm is normal with standard deviation `sigma`; `mean` tokens, before the longer ones
        are cut off at `longest`."""
        if not mean > 0 or sigma < 0 or longest < 1:
            raise ValueError(f"found mean={mean}, sigma={sigma}, longest={longest}; expected mean > 0 and sigma >= 0")
        normal = NormalDist()
        middle = math.log(mean) - sigma**2 / 2
        drawn = (math.exp(middle + sigma * normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES))
        return cls((prompt,), tuple(min(longest, max(1, round(length))) for length in drawn))

    @classmethod
    def of_samples(cls, prompts: Iterable[int], responses: Iterable[int]) -> Lengths:
        """Measured lengths, of which at most QUANTILES quantiles are kept."""
        ordered = [tuple(sorted(each)) for each in (prompts, responses)]
        kept = [_quantiles(each, min(len(each), QUANTILES)) for each in ordered]
        return cls(kept[0], tuple(max(1, length) for length in kept[1]))

    @cached_property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return fmean(self.prompts)

    @cached_property
    def response(self) -> float:
        """Mean tokens of a response."""
        return fmean(self.responses)

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a sequence."""
        return self.prompt + self.response

    @cached_property
    def pairs(self) -> float:
        """Mean of L (L + 1) / 2 over sequences of L tokens: pairs of tokens of which one attends to the other."""
        squares = [fmean(float(n * n) for n in each) for each in (self.prompts, self.responses)]
        return (sum(squares) + 2 * self.prompt * self.response + self.mean) / 2

    @cached_property
    def cached(self) -> float:
        """Mean tokens that a sequence's decode steps read from the KV cache: L P + L (L + 1) / 2 of a response of L
        tokens after P."""
        return fmean(length * (self.prompt + (length + 1) / 2) for length in self.responses)

    def longest(self, count: float) -> float:
        """Mean tokens of the longest of `count` responses: sum of x_i ((i / k)^count - ((i - 1) / k)^count), the first
        order statistic from above of k equally likely values (David and Nagaraja 2003, Order Statistics, 2.1)."""
        return _longest(self.responses, count)

    def drawn(self, count: int) -> tuple[int, ...]:
        """`count` responses, ascending, that stand for as many draws."""
        return _quantiles(self.responses, count)

    def sequences(self, count: int) -> tuple[int, ...]:
        """`count` lengths of prompt and response; long responses have prompts of any length."""
        prompts, responses = _quantiles(self.prompts, count), _quantiles(self.responses, count)
        return tuple(sorted(prompts[place] + length for place, length in zip(spread(count), responses, strict=True)))


@lru_cache(maxsize=256)
def _longest(values: tuple[int, ...], count: float) -> float:
    below, total = 0.0, 0.0
    for number, length in enumerate(values, 1):
        share = (number / len(values)) ** count
        total += length * (share - below)
        below = share
    return total


@lru_cache(maxsize=64)
def spread(count: int) -> tuple[int, ...]:
    """A permutation of 0 to count - 1 whose every part is spread over the whole range: the order of the fractional
    parts of multiples of the golden ratio (Knuth, The Art of Computer Programming 3, 6.4, theorem S)."""
    golden = (math.sqrt(5) - 1) / 2
    order = sorted(range(count), key=lambda number: (number * golden) % 1.0)
    return tuple(order)


@lru_cache(maxsize=256)
def _quantiles(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The values at (i + 1/2) / count of the range; `values` if there are as many."""
    size = len(values)
    if not size or size == count:
        return values
    if values[0] == values[-1]:
        return (values[0],) * count
    return tuple(values[min(size - 1, int((number + 0.5) * size / count))] for number in range(count))
