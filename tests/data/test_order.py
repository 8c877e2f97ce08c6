"""Data order: every row once per epoch, and a step's rows depend on nothing but its number and the seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.data.order import batch_rows, epoch_permutation, steps_for_epochs


@given(st.integers(1, 200), st.integers(0, 2**31), st.integers(0, 50))
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(num_rows, seed, epoch, True)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_rows))


@given(st.integers(1, 40), st.integers(1, 100), st.booleans())
def test_steps_laid_end_to_end_are_the_epochs(num_rows: int, batch_size: int, shuffle: bool) -> None:
    num_steps = 3 + 2 * num_rows // batch_size
    # Backwards: an earlier step leaves no state behind that a later one could read.
    batches = [batch_rows(num_rows, batch_size, step, 7, shuffle) for step in range(num_steps, 0, -1)][::-1]
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


def test_steps_for_epochs() -> None:
    assert steps_for_epochs(100, 10, 3) == 30
    assert steps_for_epochs(100, 64, 3) == 4  # 300 rows: 4 full batches
    assert steps_for_epochs(5, 64, 1) == 1
