"""How unevenly tokens are divided over the ranks of experts. No torch."""

from __future__ import annotations

import math
from statistics import NormalDist


def fullest_rank(ranks: int, num_experts: int, imbalance: float) -> float:
    """Return the tokens of the expert-parallel rank with most, as a multiple of the mean. imbalance: of the expert with
    most.

    Experts' loads are taken to be independent and normal, so that the largest of n is m(n) standard deviations above
    the mean, with m(n) the normal quantile at (n - 3/8) / (n + 1/4) (Blom 1958). The mean of a rank's k experts has a
    standard deviation that is smaller by the square root of k.
    """
    if ranks < 2 or imbalance <= 1.0:
        return 1.0
    narrower = _largest(ranks) / _largest(num_experts) / math.sqrt(num_experts / ranks)
    return min(float(ranks), 1.0 + (imbalance - 1.0) * narrower)


def _largest(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def most_of(ranks: int, balls: float) -> float:
    """Return the largest share of a rank as a multiple of the mean, of `balls` that are thrown at random:
    1 + sqrt(2 ln(n) (n - 1) / balls) (Raab and Steger 1998, theorem 1, the case of many balls)."""
    if ranks < 2 or balls <= 0:
        return 1.0
    return min(float(ranks), 1.0 + math.sqrt(2.0 * math.log(ranks) * (ranks - 1) / balls))
