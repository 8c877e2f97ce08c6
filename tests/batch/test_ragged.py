"""Ragged columns against plain lists of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.ragged import Ragged

rows_of_ints = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=7)


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, np.int32)


def as_lists(column: Ragged) -> list[list[int]]:
    return [column.row(i).tolist() for i in range(len(column))]


@given(rows_of_ints)
def test_rows_come_back(rows):
    column = ragged(rows)
    assert as_lists(column) == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert column.dtype == np.int32 and column.offsets.dtype == np.int64


@given(rows_of_ints, st.data())
def test_take_picks_rows_in_any_order_with_repeats(rows, data):
    bound = max(len(rows) - 1, 0)
    picked = data.draw(st.lists(st.integers(-len(rows), bound), max_size=9)) if rows else []
    assert as_lists(ragged(rows).take(picked)) == [rows[i] for i in picked]


@given(rows_of_ints, st.data())
def test_take_after_take_is_one_take(rows, data):
    if not rows:
        return
    first = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=9))
    column = ragged(rows)
    assert column.take(first).take(second).equal(column.take([first[i] for i in second]))


@given(st.lists(rows_of_ints, min_size=1, max_size=4))
def test_concat_is_concat_of_rows(parts):
    assert as_lists(Ragged.concat([ragged(rows) for rows in parts])) == [row for rows in parts for row in rows]


@given(rows_of_ints, st.integers(-2, 2))
def test_padded_against_naive_and_back(rows, fill):
    column = ragged(rows)
    longest = max(map(len, rows), default=0)
    padded = column.padded(fill)
    assert padded.shape == (len(rows), longest) and padded.dtype == torch.int32
    assert padded.tolist() == [row + [fill] * (longest - len(row)) for row in rows]
    assert Ragged.from_padded(padded, column.lengths).equal(column)


def test_values_are_copied_by_take_and_padded():
    column = ragged([[1, 2], [3]])
    column.take([0, 1]).values[0] = 9
    column.padded()[0, 0] = 9
    assert as_lists(column) == [[1, 2], [3]]


def test_equal_sees_dtype_order_and_nan():
    nan = Ragged.from_rows([[1.0, float("nan")]])
    assert nan.equal(Ragged.from_rows([[1.0, float("nan")]]))
    assert not ragged([[1], [2]]).equal(ragged([[2], [1]]))
    assert not ragged([[1, 2]]).equal(ragged([[1], [2]]))
    assert not ragged([[1]]).equal(Ragged.from_rows([[1]], np.int64))


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="expected 0 to the number of values"):
        Ragged(np.zeros(3), np.array([0, 2]))
    with pytest.raises(ValueError, match="expected \\(tokens,\\) and int64"):
        Ragged(np.zeros(3), np.array([0, 3], np.int32))
    with pytest.raises(TypeError, match="values are a Tensor, .*expected numpy arrays"):
        Ragged(torch.zeros(3), np.array([0, 3]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dtype"):
        Ragged.concat([ragged([[1]]), Ragged.from_rows([[1.0]])])
    with pytest.raises(ValueError, match="lengths from 0 to T"):
        Ragged.from_padded(torch.zeros(1, 2), [3])
    with pytest.raises(IndexError):
        ragged([[1]]).take([1])
    with pytest.raises(IndexError):
        ragged([[1]]).row(1)
    with pytest.raises(TypeError, match="expected integers"):
        ragged([[1]]).take([True])


def test_a_hundred_thousand_rows():
    lengths = np.arange(100_000) % 7
    column = Ragged.from_lengths(np.arange(lengths.sum()), lengths)
    back = np.arange(99_999, -1, -1)
    assert column.take(back).take(back).equal(column)
    assert Ragged.from_padded(column.padded(), lengths).equal(column)


def test_several_numbers_per_token():
    column = ragged([[1, 2, 3, 4], [], [5, 6]])
    assert column.padded_vectors(2).tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]]]
    assert ragged([[], []]).padded_vectors(3).shape == (2, 0, 3)
    with pytest.raises(ValueError, match="row 2 has 2 values; expected a multiple of 3"):
        column.padded_vectors(3)
