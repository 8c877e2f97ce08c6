"""Data order: every row once per epoch, and what comes next depends on nothing but the position and the seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.data.sampler import (
    OrderedSampler,
    epoch_permutation,
    file_cycle,
    steps_for_epochs,
    weight_quotas,
    weighted_rows_at,
)


@given(st.integers(1, 200), st.integers(0, 2**31), st.integers(0, 50))
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(num_rows, seed, epoch, True)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_rows))


@given(st.integers(1, 40), st.integers(1, 100), st.booleans())
def test_steps_laid_end_to_end_are_the_epochs(num_rows: int, batch_size: int, shuffle: bool) -> None:
    num_steps = 3 + 2 * num_rows // batch_size
    sampler = OrderedSampler(num_rows, 7, shuffle)
    batches = [sampler.next_rows(batch_size) for _ in range(num_steps)]
    rows = np.concatenate([rows for rows, _ in batches])
    epochs = np.concatenate([epochs for _, epochs in batches])
    assert rows.dtype == epochs.dtype == np.int64
    assert epochs.tolist() == [i // num_rows for i in range(len(rows))]
    for epoch in range(int(epochs[-1])):
        here = rows[epochs == epoch]
        assert here.tolist() == epoch_permutation(num_rows, 7, epoch, shuffle).tolist()
        assert sorted(here.tolist()) == list(range(num_rows))


def test_order_changes_with_seed_and_epoch_and_not_otherwise() -> None:
    orders = [epoch_permutation(100, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert epoch_permutation(5, 0, 3, False).tolist() == [0, 1, 2, 3, 4]
    # Written down: a resumed run must find this order under any numpy.
    assert epoch_permutation(8, 0, 0, True).tolist() == [6, 2, 5, 3, 4, 0, 1, 7]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_quotas_are_the_weights(weights: list[float]) -> None:
    quotas = np.array(weight_quotas(weights))
    assert quotas.sum() <= 10_000
    assert np.abs(quotas / quotas.sum() - np.array(weights) / sum(weights)).max() < 1e-4


def test_simple_weights_are_exact() -> None:
    assert weight_quotas([1, 1, 1]) == [1, 1, 1]
    assert weight_quotas([0.7, 0.3]) == [7, 3]
    assert weight_quotas([2.0, 0.5, 0.5]) == [4, 1, 1]
    assert weight_quotas([1e6, 1e-6]) == [1, 0]
    assert file_cycle((3, 1))[0].tolist() == [0, 0, 1, 0]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_a_file_is_never_far_from_its_share(weights: list[float]) -> None:
    quotas = weight_quotas(weights)
    files, before = file_cycle(tuple(quotas))
    places = np.arange(1, len(files) + 1)
    for file, quota in enumerate(quotas):
        drawn = np.cumsum(files == file)
        assert np.abs(drawn - places * quota / len(files)).max() <= len(quotas)
        assert before[files == file].tolist() == list(range(quota))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.2, 0.5, 1.0, 3.0])), min_size=1, max_size=4),
    st.integers(0, 200),
    st.integers(1, 60),
)
def test_weighted_rows_pass_over_each_file_in_epochs(files: list[tuple[int, float]], start: int, count: int) -> None:
    sizes = [size for size, _ in files]
    quotas = weight_quotas([weight for _, weight in files])
    rows, epochs = weighted_rows_at(np.arange(300, dtype=np.int64), sizes, quotas, 3, True)
    assert rows.dtype == epochs.dtype == np.int64
    ends = np.cumsum(sizes)
    for size, end in zip(sizes, ends, strict=True):
        mine = (rows >= end - size) & (rows < end)
        assert epochs[mine].tolist() == [i // size for i in range(mine.sum())]
        for epoch in range(mine.sum() // size):
            assert sorted(rows[mine & (epochs == epoch)].tolist()) == list(range(end - size, end))
    # A position is all that is needed to go on.
    stop = min(start + count, 300)
    part = weighted_rows_at(np.arange(start, stop, dtype=np.int64), sizes, quotas, 3, True)
    assert part[0].tolist() == rows[start:stop].tolist()
    assert part[1].tolist() == epochs[start:stop].tolist()


def test_files_of_equal_size_have_orders_of_their_own() -> None:
    rows, _ = weighted_rows_at(np.arange(100, dtype=np.int64), [50, 50], [1, 1], 0, True)
    assert rows[::2].tolist() != (rows[1::2] - 50).tolist()


def test_steps_for_epochs() -> None:
    assert steps_for_epochs(100, 10, 3) == 30
    assert steps_for_epochs(100, 64, 3) == 4  # 300 rows: 4 full batches
    assert steps_for_epochs(5, 64, 1) == 1
    assert steps_for_epochs(100, 10, 3, steps_done=4, rows_done=200) == 14  # 4 of 50 rows, 10 of 10
