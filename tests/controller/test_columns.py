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
    Shares,
    merge_rows,
    places,
    receivers_of,
    rows_between,
    rows_of_each,
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


@given(ranks_of_rows, st.data())
def test_a_share_is_enough_for_its_rank(rank: np.ndarray, data: st.DataObject) -> None:
    """Each rank moves the same rows of its columns, in the same order, as if it knew where all rows are. The shares
    have the entries of the rows that a rank has or needs, and no others."""
    size = len(rank)

    def drawn() -> np.ndarray:
        return np.array(data.draw(st.lists(st.integers(0, RANKS - 1), min_size=size, max_size=size)), np.int32)

    order = np.array(data.draw(st.permutations(range(size))), np.int64)
    destination, shuffled = drawn(), Location.of_block(Block(2), rank).take(order)
    joined = Location.concat([Location.of_block(Block(3), part) for part in np.split(drawn(), [size // 2])])
    reads = [Read("x", Location.of_block(Block(1), rank)), Read("y", shuffled, moved_to=5), Read("z", joined)]
    shares = Shares(reads, destination)
    for mine in range(RANKS):
        share = pickle.loads(pickle.dumps(shares.of(mine)))
        concerns = (destination == mine) | np.any([read.location.rank == mine for read in reads], axis=0)
        assert share.size == concerns.sum()
        assert np.array_equal(share.destinations, destination[concerns])
        assert receivers_of(share.reads, share.destinations, mine) == receivers_of(reads, destination, mine)
        assert senders_of(share.reads, share.destinations, mine) == senders_of(reads, destination, mine)
        for read, whole in zip(share.reads, reads, strict=True):
            assert (read.column, read.moved_to) == (whole.column, whole.moved_to)
            for other in range(RANKS):
                sent = rows_between(read.location, share.destinations, mine, other)
                expected = rows_between(whole.location, destination, mine, other)
                assert np.array_equal(np.flatnonzero(concerns)[sent], expected)
                for name in ("block", "row"):
                    assert np.array_equal(getattr(read.location, name)[sent], getattr(whole.location, name)[expected])
                got = rows_between(read.location, share.destinations, other, mine)
                expected = rows_between(whole.location, destination, other, mine)
                assert np.array_equal(np.flatnonzero(concerns)[got], expected)


@given(ranks_of_rows)
def test_rows_of_each_replica(replica: np.ndarray) -> None:
    for number, rows in enumerate(rows_of_each(replica, RANKS + 1)):
        assert np.array_equal(rows, np.flatnonzero(replica == number))


def test_a_location_refers_only_to_the_blocks_of_its_rows() -> None:
    """The surplus of a step is joined with the next step's, again and again: old blocks must be freed."""
    rest = Location.of_block(Block(0), np.zeros(2, np.int32))
    for number in range(1, 6):
        joined = Location.concat([rest, Location.of_block(Block(number), np.zeros(4, np.int32))])
        rest = joined.take(np.array([4, 5]))
        assert [block.id for block in rest.references] == [number]
