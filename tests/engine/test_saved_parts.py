"""Who writes what of a checkpoint."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.engine.model_state import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    start, stop = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return shape, start, stop


@given(ranges())
def test_boxes_are_the_range_in_its_own_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    array = np.arange(math.prod(shape)).reshape(shape)
    found = list(boxes(shape, start, stop))
    parts = [array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel() for box in found]
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
