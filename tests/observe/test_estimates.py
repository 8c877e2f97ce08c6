"""Standard errors, paired differences and pass@k: by hand, by enumeration, and by their coverage."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from hpcrl.observe.read.comparison import Estimate, ks_of, mean_over_problems, paired_difference, pass_at_k, t_quantile


def test_mean_and_standard_error_by_hand() -> None:
    found = mean_over_problems(np.array([0.0, 0.5, 1.0, 0.5]))
    # squared deviations 1/4 + 0 + 1/4 + 0; variance 1/6; of the mean 1/24
    assert found == Estimate(0.5, pytest.approx(math.sqrt(1 / 24)), 4)
    low, high = found.interval
    assert (low, high) == pytest.approx((0.5 - 3.182 * math.sqrt(1 / 24), 0.5 + 3.182 * math.sqrt(1 / 24)), abs=1e-3)
    one = mean_over_problems(np.array([0.25]))
    assert one.mean == 0.25 and math.isnan(one.standard_error) and math.isnan(one.interval[0])


def test_problems_are_the_clusters_of_samples() -> None:
    """The error is that of a regression on a constant with errors clustered by problem, times P / (P - 1)."""
    scores = np.random.default_rng(0).random((7, 3))
    residuals = scores - scores.mean()
    clustered = math.sqrt(sum(row.sum() ** 2 for row in residuals)) / scores.size
    assert mean_over_problems(scores.mean(axis=1)).standard_error == pytest.approx(clustered * math.sqrt(7 / 6))


def test_paired_difference_by_hand() -> None:
    first, second = np.array([0.0, 0.5, 1.0, 1.0]), np.array([0.5, 0.5, 1.0, 0.0])
    found = paired_difference(first, second)
    # differences 1/2, 0, 0, -1 with mean -1/8: squared deviations (25 + 1 + 1 + 49) / 64
    assert found.mean == -0.125 and found.standard_error == pytest.approx(math.sqrt(76 / 64 / 3 / 4))
    assert (found.wins, found.losses, found.ties) == (1, 1, 2)
    back = paired_difference(second, first)
    assert (back.mean, back.standard_error, back.wins) == (0.125, found.standard_error, 1)
    same = paired_difference(first, first)
    assert (same.mean, same.standard_error, same.ties) == (0.0, 0.0, 4)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for right in range(n + 1):
        samples = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            shares = [any(subset) for subset in combinations(samples, k)]
            assert pass_at_k(np.array([right]), n, k) == pytest.approx(np.mean(shares))
    assert pass_at_k(np.array([0, n]), n, n).tolist() == [0, 1]
    with pytest.raises(ValueError, match=f"expected k between 1 and {n}"):
        pass_at_k(np.array([0]), n, n + 1)


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(np.array([0, 1, 3000]), 3000, 1000) == pytest.approx([0, 1 / 3, 1])
    assert [ks_of(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_t_quantiles() -> None:
    """Against a table."""
    table = {2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 29: 2.0452, 1000: 1.9623}
    assert {degrees: t_quantile(degrees) for degrees in table} == pytest.approx(table, rel=0.008)
    assert t_quantile(5) == pytest.approx(2.5706, abs=1e-3) and t_quantile(29) == pytest.approx(2.0452, abs=1e-4)


@pytest.mark.parametrize(("num_problems", "num_samples"), [(40, 8), (60, 1), (200, 4)])
def test_intervals_cover_the_truth(num_problems: int, num_samples: int) -> None:
    """Of 1500 experiments with new problems and new samples, 95% of the intervals have the mean over the population.

    A problem is easy, medium or hard for both models, and they draw their samples independently.
    """
    rng = np.random.default_rng(7)
    easiness = np.array([[0.1, 0.2], [0.4, 0.6], [0.9, 0.85]])  # of three kinds of problems for two models
    truth = easiness.mean(axis=0)
    k = max(num_samples // 2, 1)
    truth_pass = float((1 - (1 - easiness[:, 0]) ** k).mean())
    covered = np.zeros(3)
    for _ in range(1500):
        kinds = rng.integers(3, size=num_problems)
        right = rng.binomial(num_samples, easiness[kinds].T)  # (2, P)
        means = right / num_samples
        found = [
            (mean_over_problems(means[0]), truth[0]),
            (paired_difference(*means), truth[1] - truth[0]),
            (mean_over_problems(pass_at_k(right[0], num_samples, k)), truth_pass),
        ]
        covered += [low <= true <= high for (low, high), true in ((one.interval, true) for one, true in found)]
    assert ((covered / 1500 > 0.93) & (covered / 1500 < 0.97)).all(), covered / 1500
