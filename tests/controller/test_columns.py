"""Moves of columns as pure functions: every row leaves its owner once and arrives in batch order."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.batch.ragged import Ragged
from hpcrl.controller.columns import (
    Block,
    ColumnStore,
    Location,
    Read,
    merge_rows,
    places,
    receivers_of,
    rows_between,
    senders_of,
)

RANKS = 4
ranks_of_rows = st.lists(st.integers(0, RANKS - 1), max_size=12).map(lambda rows: np.array(rows, np.int32))


@given(ranks_of_rows)
def test_places_count_the_rows_of_each_rank(rank: np.ndarray) -> None:
    for r in range(RANKS):
        assert places(rank)[rank == r].tolist() == list(range(int((rank == r).sum())))


@given(ranks_of_rows, st.data())
def test_locations_survive_the_wire(rank: np.ndarray, data: st.DataObject) -> None:
    location = Location.of_block(Block(7), rank)
    rows = np.array(data.draw(st.lists(st.integers(0, len(rank) - 1), max_size=8)) if len(rank) else [], np.int64)
    for case in (location, location.take(rows), Location.concat([location, Location.of_block(Block(9), rank)])):
        back = pickle.loads(pickle.dumps(case))
        for name in ("block", "rank", "row"):
            assert np.array_equal(getattr(back, name), getattr(case, name))


@given(ranks_of_rows, st.data())
def test_a_move_brings_every_row_to_its_destination_once(rank: np.ndarray, data: st.DataObject) -> None:
    size = len(rank)
    destination = np.array(data.draw(st.lists(st.integers(0, RANKS - 1), min_size=size, max_size=size)), np.int32)
    whole = Ragged.from_rows([[i] * (i % 3) for i in range(size)], np.int32)
    read = Read("x", Location.of_block(Block(1), rank))
    stores = [ColumnStore() for _ in range(RANKS)]
    for r, store in enumerate(stores):
        store[1] = whole.take(np.flatnonzero(rank == r))
    for receiver in range(RANKS):
        needed = np.flatnonzero(destination == receiver)
        parts, positions, senders = [], [], []
        for sender in range(RANKS):
            rows = rows_between(read.location, destination, sender, receiver)
            if len(rows):
                parts.append(stores[sender].rows(read.location, rows))
                positions.append(np.searchsorted(needed, rows))
                senders.append(sender)
        assert [s for s in senders if s != receiver] == senders_of([read], destination, receiver)
        assert all(receiver in receivers_of([read], destination, s) for s in senders if s != receiver)
        if len(needed):
            assert merge_rows(parts, positions).equal(whole.take(needed))


def test_a_location_refers_only_to_the_blocks_of_its_rows() -> None:
    """The surplus of a step is joined with the next step's, again and again: old blocks must be freed."""
    rest = Location.of_block(Block(0), np.zeros(2, np.int32))
    for number in range(1, 6):
        joined = Location.concat([rest, Location.of_block(Block(number), np.zeros(4, np.int32))])
        rest = joined.take(np.array([4, 5]))
        assert [block.id for block in rest.references] == [number]
