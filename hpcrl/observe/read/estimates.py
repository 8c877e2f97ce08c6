"""Means over problems with their standard errors, paired differences, and pass@k. Pure functions of arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. standard_error: NaN for one problem, which has none."""

    mean: float
    standard_error: float
    num_problems: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: mean -+ t * standard_error, with t of num_problems - 1 degrees of freedom."""
        half = t_quantile(self.num_problems - 1) * self.standard_error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Difference(Estimate):
    """The mean over problems of second minus first. wins: problems where the second is higher; losses: lower."""

    wins: int
    losses: int

    @property
    def ties(self) -> int:
        return self.num_problems - self.wins - self.losses


def mean_over_problems(values: np.ndarray) -> Estimate:
    """Mean and standard error of one number per problem, such as the mean score of its samples.

    values: float64 (P,). The standard error is sqrt(sum_i (v_i - mean)^2 / (P (P - 1))): that of the central limit
    theorem for problems drawn from a larger population (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640).
    The samples of a problem are one cluster, so it covers both the choice of the problems and the sampling of
    responses; more samples per problem reduce the second part only.
    """
    count = len(values)
    error = math.sqrt(float(np.var(values, ddof=1)) / count) if count > 1 else math.nan
    return Estimate(float(np.mean(values)), error, count)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Mean and standard error of second - first over the same problems (Miller 2024: paired differences).

    first, second: float64 (P,), one number per problem in the same order. What makes a problem easy or hard for both
    cancels, so the standard error is usually smaller than that of two separate means.
    """
    change = second - first
    estimate = mean_over_problems(change)
    wins, losses = int(np.sum(change > 0)), int(np.sum(change < 0))
    return Difference(estimate.mean, estimate.standard_error, estimate.num_problems, wins, losses)


def pass_at_k(num_right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased estimate, per problem, of the probability that one of k samples is right.

    num_right: int64 (P,), right samples of n. Returns float64 (P,): 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1). Raises ValueError unless
    1 <= k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples; expected k between 1 and {n}")
    counts, place = np.unique(num_right, return_inverse=True)
    of_count = [1 - math.comb(n - right, k) / math.comb(n, k) for right in counts.tolist()]
    return np.array(of_count)[place]


def ks_of(n: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... below n, and n."""
    return [2**power for power in range(n.bit_length()) if 2**power < n] + [n]


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t distribution (Abramowitz and Stegun 1964, 26.7.5): within 0.8% from 2 degrees of
    freedom, 11% too small for one; NaN for none."""
    if degrees < 1:
        return math.nan
    terms = (
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
