"""Karmarkar-Karp partitions and the assignment of samples to replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.packing import balanced_assignment, karmarkar_karp

weights_lists = st.lists(st.integers(0, 1000), max_size=40)


def naive_karmarkar_karp(weights: list[int], k: int) -> list[int]:
    """Sums of the largest differencing method with all k subsets written out; ascending."""
    partitions = [sorted([weight] + [0] * (k - 1)) for weight in weights]
    while len(partitions) > 1:
        partitions.sort(key=lambda sums: sums[0] - sums[-1])
        a, b = partitions.pop(0), partitions.pop(0)
        partitions.append(sorted(x + y for x, y in zip(a, reversed(b), strict=True)))
    return partitions[0] if partitions else [0] * k


def greedy(weights: list[int], k: int) -> int:
    sums = [0] * k
    for weight in sorted(weights, reverse=True):
        sums[sums.index(min(sums))] += weight
    return max(sums)


@given(weights_lists, st.integers(1, 9))
def test_every_item_is_in_one_subset(weights, k):
    subsets = karmarkar_karp(weights, k)
    assert len(subsets) == k
    assert sorted(i for subset in subsets for i in subset) == list(range(len(weights)))
    assert all(subset == sorted(subset) for subset in subsets)
    assert subsets == karmarkar_karp(weights, k)


@given(weights_lists, st.integers(1, 9))
def test_close_to_the_mean_and_to_greedy(weights, k):
    largest = max(sum(weights[i] for i in subset) for subset in karmarkar_karp(weights, k))
    assert largest <= sum(weights) / k + max(weights, default=0)
    assert largest <= greedy(weights, k) * 4 / 3 + 1e-9


@given(weights_lists, st.integers(1, 9))
def test_sums_of_the_textbook_method(weights, k):
    sums = sorted(sum(weights[i] for i in subset) for subset in karmarkar_karp(weights, k))
    assert sums == naive_karmarkar_karp(weights, k)


@pytest.mark.parametrize(
    ("weights", "k", "sums"),
    [
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # the example of the paper: differencing leaves 2
        ([4, 5, 6, 7, 8], 3, [8, 11, 11]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, [9, 9, 9, 9]),
        ([5], 3, [0, 0, 5]),
        ([], 2, [0, 0]),
    ],
)
def test_known_partitions(weights, k, sums):
    assert sorted(sum(weights[i] for i in subset) for subset in karmarkar_karp(weights, k)) == sums


def test_better_than_greedy_on_long_tails():
    weights = (np.random.default_rng(0).pareto(1.5, 4096) * 100).astype(np.int64) + 10
    sums = [weights[subset].sum() for subset in karmarkar_karp(weights, 16)]
    assert max(sums) - min(sums) <= 10


def test_no_subsets_is_an_error():
    with pytest.raises(ValueError, match="expected at least 1"):
        karmarkar_karp([1], 0)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 7)), max_size=40), st.integers(1, 5))
def test_groups_stay_together_and_each_mini_batch_is_balanced(samples, k):
    weights = np.array([weight for weight, _ in samples], dtype=np.int64)
    groups = np.array([f"prompt {group}" for _, group in samples], dtype=object)
    mini_batches = np.array([group % 2 for _, group in samples], dtype=np.int32)
    replica = balanced_assignment(weights, k, groups=groups, mini_batches=mini_batches)
    assert replica.dtype == np.int32 and replica.shape == weights.shape
    assert ((replica >= 0) & (replica < k)).all()
    assert np.array_equal(replica, balanced_assignment(weights, k, groups=groups, mini_batches=mini_batches))
    for group in set(groups):
        assert len(set(replica[groups == group])) == 1
    for number in set(mini_batches):
        mine = mini_batches == number
        work = np.bincount(replica[mine], weights[mine], minlength=k)
        heaviest = max(weights[groups == group].sum() for group in set(groups[mine]))
        assert work.max() - work.min() <= heaviest


def test_heavy_shares_of_later_mini_batches_go_where_least_is():
    weights = np.array([5, 1, 5, 1, 5, 1, 5, 1])
    replica = balanced_assignment(weights, 2, mini_batches=np.arange(8) // 2)
    assert np.bincount(replica, weights).tolist() == [12, 12]


def test_fewer_samples_than_replicas():
    assert sorted(balanced_assignment(np.array([3, 4]), 5).tolist()) == [0, 1]
    assert balanced_assignment(np.zeros(0, dtype=np.int64), 5).tolist() == []


def test_a_group_in_two_mini_batches_is_an_error():
    with pytest.raises(ValueError, match="lies in two mini-batches"):
        balanced_assignment(np.ones(2), 2, groups=np.zeros(2), mini_batches=np.arange(2))
    with pytest.raises(ValueError, match="expected equally many"):
        balanced_assignment(np.ones(2), 2, groups=np.zeros(3))
