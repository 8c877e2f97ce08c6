"""Micro-batches by token budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.packing import micro_batches

lengths_lists = st.lists(st.integers(1, 64), max_size=40)


def loads(batches: list[np.ndarray], lengths: list[int]) -> list[int]:
    return [int(np.asarray(lengths)[rows].sum()) if rows.size else 0 for rows in batches]


def first_fit_decreasing(lengths: list[int], max_tokens: int) -> int:
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        for i, load in enumerate(bins):
            if load + length <= max_tokens:
                bins[i] += length
                break
        else:
            bins.append(length)
    return len(bins)


def check(batches: list[np.ndarray], lengths: list[int], max_tokens: int) -> None:
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(lengths)))
    assert all(rows.dtype == np.int64 and rows.tolist() == sorted(rows.tolist()) for rows in batches)
    tokens = loads(batches, lengths)
    assert all(load <= max_tokens for load in tokens)
    peak = tokens.index(max(tokens)) if tokens else 0
    assert tokens[: peak + 1] == sorted(tokens[: peak + 1])
    assert tokens[peak:] == sorted(tokens[peak:], reverse=True)


@given(lengths_lists, st.integers(64, 200))
def test_budget_order_and_count(lengths, max_tokens):
    batches = micro_batches(np.array(lengths, dtype=np.int64), max_tokens)
    check(batches, lengths, max_tokens)
    assert -(-sum(lengths) // max_tokens) <= len(batches) <= first_fit_decreasing(lengths, max_tokens) + 1
    again = micro_batches(np.array(lengths, dtype=np.int64), max_tokens)
    assert [rows.tolist() for rows in again] == [rows.tolist() for rows in batches]


@given(lengths_lists, st.integers(64, 200), st.integers(0, 30))
def test_a_forced_count_is_kept(lengths, max_tokens, more):
    needed = len(micro_batches(np.array(lengths, dtype=np.int64), max_tokens))
    batches = micro_batches(np.array(lengths, dtype=np.int64), max_tokens, count=needed + more)
    assert len(batches) == needed + more
    check(batches, lengths, max_tokens)


def test_balanced_by_tokens():
    batches = micro_batches(np.array([10] * 12), 50)
    assert loads(batches, [10] * 12) == [40, 40, 40]


def test_smallest_at_both_ends():
    lengths = [9, 7, 6, 4, 2]
    assert loads(micro_batches(np.array(lengths), 9, count=5), lengths) == [2, 6, 9, 7, 4]


def test_more_micro_batches_than_sequences():
    batches = micro_batches(np.array([3, 5]), 8, count=4)
    assert sorted(rows.tolist() for rows in batches) == [[], [], [0], [1]]
    assert [rows.size for rows in micro_batches(np.zeros(0, dtype=np.int64), 8, count=3)] == [0, 0, 0]
    assert micro_batches(np.zeros(0, dtype=np.int64), 8) == []


def test_tight_packings_are_found():
    assert len(micro_batches(np.array([6, 5, 4, 3, 1, 1]), 10)) == 2
    assert len(micro_batches(np.array([51] * 100), 100)) == 100


def test_what_cannot_be_is_one_clear_line():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens; .* raise ppo_max_token_len_per_gpu to 9"):
        micro_batches(np.array([3, 9]), 8)
    with pytest.raises(ValueError, match="1 micro-batches asked for, .* ask for 2 or more"):
        micro_batches(np.array([5, 5]), 8, count=1)


def test_many_sequences_take_seconds_at_most():
    lengths = np.random.default_rng(0).integers(10, 3000, 50_000)
    start = time.perf_counter()
    batches = micro_batches(lengths, 4096)
    assert time.perf_counter() - start < 10  # 0.4 s on an idle core; quadratic would take minutes
    assert len(batches) <= 1.01 * lengths.sum() / 4096
