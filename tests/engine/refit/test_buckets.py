"""Cutting moves to a bounded size loses and doubles nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.engine.refit.messages import messages, pages, size
from hpcrl.engine.refit.planner import Move

ITEMSIZE = 4


def move(name: str, rows: int, cols: int, src: tuple[int, int], dst: tuple[int, int]) -> Move:
    return Move(name, 0, 1, *src, *dst, rows, cols, rows * cols * ITEMSIZE, name)


moves = st.lists(
    st.builds(
        move,
        st.sampled_from("ab"),
        st.integers(1, 6),
        st.integers(1, 6),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=6,
)
limits = st.integers(ITEMSIZE, 200).map(lambda limit: limit // ITEMSIZE * ITEMSIZE)


def elements(pieces: list[Move]) -> Counter:
    """Which source element goes to which destination element, how often."""
    return Counter(
        (piece.name, piece.src_row + row, piece.src_col + col, piece.dst_row + row, piece.dst_col + col)
        for piece in pieces
        for row, col in np.ndindex(piece.rows, piece.cols)
    )


@given(moves, limits)
def test_messages_have_everything_within_the_limit(its, limit) -> None:
    cut = messages(its, limit)
    assert elements([part.move for parts in cut for part in parts]) == elements(its)
    for parts in cut:
        assert 0 < size(parts) <= limit
        assert [part.offset for part in parts[1:]] == [part.offset + part.move.nbytes for part in parts[:-1]]


@given(st.dictionaries(st.integers(1, 4), moves, max_size=4), limits)
def test_readers_of_pages_find_all_their_moves(sends, limit) -> None:
    published, read = pages(sends, limit)
    rectangles = {(it.name, it.src_row, it.src_col, it.rows, it.cols) for its in sends.values() for it in its}
    packed = elements([part.move._replace(dst_row=0, dst_col=0) for page in published for part in page.parts])
    once = elements([move(name, rows, cols, (row, col), (0, 0)) for name, row, col, rows, cols in rectangles])
    assert {place[:3] for place in packed} == {place[:3] for place in once}
    assert sum(packed.values()) == sum(once.values())  # each rectangle once, however many read it
    assert all(0 < page.nbytes == size(page.parts) <= limit for page in published)
    for reader, its in sends.items():
        found = read[reader]
        assert elements([part.move for parts in found.values() for part in parts]) == elements(its)
        assert set(found) == {number for number, page in enumerate(published) if reader in page.readers}
        for number, parts in found.items():
            laid = {
                (part.offset, part.move.name, part.move.src_row, part.move.src_col) for part in published[number].parts
            }
            assert {(part.offset, part.move.name, part.move.src_row, part.move.src_col) for part in parts} <= laid
