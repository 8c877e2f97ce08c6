"""Mini-batch membership."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.packing import mini_batch_of


@given(st.integers(0, 50), st.integers(1, 20), st.integers(-3, 2**40), st.integers(0, 100), st.booleans())
def test_sizes(num_prompts, size, seed, step, shuffle):
    number = mini_batch_of(num_prompts, size, seed=seed, step=step, ppo_epoch=0, shuffle=shuffle)
    assert number.dtype == np.int32 and number.shape == (num_prompts,)
    counts = np.bincount(number).tolist()
    assert all(count == size for count in counts[:-1]) and (not counts or 0 < counts[-1] <= size)
    assert len(counts) == -(-num_prompts // size)


def test_keyed_by_seed_step_and_epoch():
    base = {"seed": 1, "step": 2, "ppo_epoch": 0, "shuffle": True}
    first = mini_batch_of(64, 16, **base)
    assert np.array_equal(first, mini_batch_of(64, 16, **base))
    for change in ({"seed": 2}, {"step": 3}, {"ppo_epoch": 1}, {"seed": 2, "step": 1}):
        assert not np.array_equal(first, mini_batch_of(64, 16, **{**base, **change}))


def test_the_numbers_are_pinned():
    """A run that resumes on another machine must draw the same mini-batches."""
    assert mini_batch_of(8, 3, seed=7, step=5, ppo_epoch=1, shuffle=True).tolist() == [1, 0, 0, 2, 2, 0, 1, 1]


def test_without_shuffle_prompts_stay_in_order():
    assert mini_batch_of(5, 2, seed=0, step=0, ppo_epoch=0, shuffle=False).tolist() == [0, 0, 1, 1, 2]


def test_empty_mini_batches_are_refused():
    with pytest.raises(ValueError, match="ppo_mini_batch_size is 0"):
        mini_batch_of(4, 0, seed=0, step=0, ppo_epoch=0, shuffle=True)
