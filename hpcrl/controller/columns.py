"""Where columns are, and how they move from one leader to another.

Token-level columns stay in host memory of the replicas' leaders. Rank 0 has the `Location` of a column: for every row
the block that it is part of, the rank that has it and its place there. Sender and receiver compute what to move from
the location and a destination, with the same pure functions, so they exchange no messages about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hpcrl.batch.data_proto import LocalColumn
from hpcrl.batch.ragged import Ragged


class Block:
    """Rank 0's reference to rows that one command stored on the ranks, which free them when it is garbage-collected."""

    def __init__(self, id: int) -> None:
        self.id = id


@dataclass(frozen=True)
class Location:
    """Where the rows of a column are. All arrays int32 (N,).

    block: id of the block that the row is part of; rank: world rank that has it; row: its place in that rank's part.
    references: on rank 0, the blocks; they stay in memory for as long as a location refers to them.
    """

    block: np.ndarray
    rank: np.ndarray
    row: np.ndarray
    references: tuple[Block, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def of_block(cls, block: Block, rank: np.ndarray) -> Location:
        """The location of a whole block, of which each rank has its rows in batch order."""
        return cls(np.full(len(rank), block.id, np.int32), rank, places(rank), (block,))

    def take(self, rows: np.ndarray) -> Location:
        """The given rows, without references to blocks that have none of them."""
        block, references = self.block[rows], self.references
        if len(references) > 1:
            used = set(np.unique(block).tolist())
            references = tuple(reference for reference in references if reference.id in used)
        return Location(block, self.rank[rows], self.row[rows], references)

    @staticmethod
    def concat(parts: Sequence[Location]) -> Location:
        references = tuple({block.id: block for part in parts for block in part.references}.values())
        block, rank, row = (np.concatenate([getattr(p, name) for p in parts]) for name in ("block", "rank", "row"))
        return Location(block, rank, row, references)


def rows_of_each(replica: np.ndarray, num_replicas: int) -> list[np.ndarray]:
    """Ascending rows of each replica, from the replica of each row, int (N,)."""
    order = np.argsort(replica, kind="stable")
    return np.split(order, np.searchsorted(replica[order], np.arange(1, num_replicas)))


def places(rank: np.ndarray) -> np.ndarray:
    """(N,) ranks -> (N,) int32 place of each row among the rows of its rank, in order."""
    order = np.argsort(rank, kind="stable")
    ordered = rank[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(rank) else np.zeros(0, np.int64)
    counts = np.diff(np.r_[starts, len(rank)])
    result = np.empty(len(rank), np.int32)
    result[order] = np.arange(len(rank)) - np.repeat(starts, counts)
    return result


class PlacedColumn:
    """A column of rank 0's batch whose rows are on leaders (see `hpcrl.batch.data_proto.RemoteColumn`)."""

    def __init__(self, locations: list[Location], fetch: Callable[[PlacedColumn], LocalColumn]) -> None:
        self.locations = locations  # the first is where the rows were written, the others are copies
        self._fetch = fetch

    def __len__(self) -> int:
        return len(self.locations[0])

    def take(self, rows: np.ndarray) -> PlacedColumn:
        return PlacedColumn([location.take(rows) for location in self.locations], self._fetch)

    def concat(self, others: Sequence[Any]) -> PlacedColumn:
        parts: list[PlacedColumn] = [self, *others]
        return PlacedColumn([Location.concat([part.locations[0] for part in parts])], self._fetch)

    def fetch(self) -> LocalColumn:
        """Copy all rows to rank 0, for inspection."""
        return self._fetch(self)

    def nearest(self, ranks: np.ndarray) -> Location:
        """The location from which the fewest rows have to move to `ranks`."""
        return min(self.locations, key=lambda location: int((location.rank != ranks).sum()))


@dataclass(frozen=True)
class Read:
    """A column that a command reads: its name in the batch, where it is, and the block it becomes if it moves."""

    column: str
    location: Location
    moved_to: int | None = None


@dataclass(frozen=True)
class Share:
    """One rank's part of a move: the rows that it has or needs, of every column that is read, in batch order.

    It is enough for the rank to compute what it sends and receives. A number in place of an array, int32 (size,), is
    the value of all its entries.

    destination: leader that gets the row. places: rank that has the row and, if it is this one, the row's place there;
    None: they are numbered in order. columns: name, index in `places`, block, `Read.moved_to`.
    """

    size: int
    destination: int | np.ndarray
    places: tuple[tuple[int | np.ndarray, np.ndarray | None], ...]
    columns: tuple[tuple[str, int, int | np.ndarray, int | None], ...]

    @cached_property
    def destinations(self) -> np.ndarray:
        """int32 (size,)"""
        return self._array(self.destination)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """The columns, with their locations. Places on other ranks are meaningless."""
        ranks = [self._array(rank) for rank, _ in self.places]
        rows = [places(rank) if row is None else row for rank, (_, row) in zip(ranks, self.places, strict=True)]
        return tuple(
            Read(name, Location(self._array(block), ranks[index], rows[index]), moved_to)
            for name, index, block, moved_to in self.columns
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("size", "destination", "places", "columns")}

    def _array(self, values: int | np.ndarray) -> np.ndarray:
        return np.full(self.size, values, np.int32) if isinstance(values, int) else values


class Shares:
    """A move divided into one share for each rank. All shares together have O(rows + ranks) entries, and are computed
    in O(rows log rows + ranks)."""

    def __init__(self, reads: Sequence[Read], destination: np.ndarray) -> None:
        located = {(id(read.location.rank), id(read.location.row)): read.location for read in reads}
        self._rank, self._rows, starts = _rows_by_rank([destination, *(place.rank for place in located.values())])
        ends = [*starts[1:].tolist(), len(self._rows)]
        self._number = {rank: number for number, rank in enumerate(self._rank[starts].tolist())}
        self._spans = [slice(*span) for span in zip(starts.tolist(), ends, strict=True)] if len(self._rows) else []
        self._destination = _Parts(destination[self._rows], starts)
        self._places = [self._place(location, starts) for location in located.values()]
        index = {key: number for number, key in enumerate(located)}
        self._columns = [
            (read.column, index[id(read.location.rank), id(read.location.row)], self._block(read), read.moved_to)
            for read in reads
        ]
        has_one_block = all(isinstance(block, int) for _, _, block, _ in self._columns)
        self._same_columns = tuple(self._columns) if has_one_block else None

    def of(self, rank: int) -> Share:
        """The share of a rank, which may have no rows."""
        number = self._number.get(rank)
        if number is None:
            nothing = tuple((name, 0, 0, moved_to) for name, _, _, moved_to in self._columns)
            return Share(0, 0, ((0, None),), nothing)  # type: ignore[arg-type]
        span = self._spans[number]
        columns = self._same_columns or tuple(
            (name, index, block if isinstance(block, int) else block[span], moved_to)
            for name, index, block, moved_to in self._columns
        )
        at = tuple(
            (ranks.of(number, span), None if in_order[number] else row[span]) for ranks, row, in_order in self._places
        )
        return Share(span.stop - span.start, self._destination.of(number, span), at, columns)  # type: ignore[arg-type]

    def _block(self, read: Read) -> int | np.ndarray:
        block = read.location.block
        return int(block[0]) if len(block) and bool((block == block[0]).all()) else block[self._rows]

    def _place(self, location: Location, starts: np.ndarray) -> tuple[_Parts, np.ndarray, list[bool]]:
        """Ranks of the rows, places of those that a rank has itself, and whether these count from 0 in each share."""
        ranks = location.rank[self._rows]
        own = ranks == self._rank
        row = np.where(own, location.row[self._rows], 0).astype(np.int32)
        if not len(starts):
            return _Parts(ranks, starts), row, []
        counted = np.cumsum(own)
        before = np.repeat(counted[starts] - own[starts], np.diff(np.r_[starts, len(ranks)]))
        in_order = np.logical_and.reduceat(~own | (row == counted - 1 - before), starts)
        return _Parts(ranks, starts), row, in_order.tolist()


class _Parts:
    """Consecutive parts of an array, each as one number if all its entries are equal."""

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        self._values = values
        self._lowest = np.minimum.reduceat(values, starts).tolist() if len(starts) else []
        self._highest = np.maximum.reduceat(values, starts).tolist() if len(starts) else []

    def of(self, number: int, span: slice) -> int | np.ndarray:
        lowest = self._lowest[number]
        return int(lowest) if lowest == self._highest[number] else self._values[span]


def _rows_by_rank(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that have a rank in any of the arrays (N,), rank by rank: ranks and rows (M,), where each rank begins."""
    size = len(arrays[0])
    distinct: list[np.ndarray] = []
    for array in arrays:
        if not any(array is other or np.array_equal(array, other) for other in distinct):
            distinct.append(array)
    keys = np.sort(np.concatenate([array.astype(np.int64) * size + np.arange(size) for array in distinct]))
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique hashes: 50 times as long in numpy 2
    rank, rows = np.divmod(keys, max(size, 1))
    starts = np.flatnonzero(np.diff(rank, prepend=-1)) if size else np.zeros(0, np.int64)
    return rank, rows, starts


def rows_between(location: Location, destination: np.ndarray, sender: int, receiver: int) -> np.ndarray:
    """Batch rows that `sender` has and `receiver` needs, in batch order."""
    return np.flatnonzero((location.rank == sender) & (destination == receiver))


def receivers_of(reads: Iterable[Read], destination: np.ndarray, sender: int) -> list[int]:
    """Ranks other than `sender` to which it sends rows of any column."""
    return _ranks_in((destination[read.location.rank == sender] for read in reads), without=sender)


def senders_of(reads: Iterable[Read], destination: np.ndarray, receiver: int) -> list[int]:
    """Ranks other than `receiver` that send it rows of any column."""
    return _ranks_in((read.location.rank[destination == receiver] for read in reads), without=receiver)


def _ranks_in(parts: Iterable[np.ndarray], without: int) -> list[int]:
    return sorted({rank for part in parts for rank in ranks_in(part)} - {without})


def ranks_in(ranks: np.ndarray) -> list[int]:
    """The distinct ranks, ascending."""
    return np.flatnonzero(np.bincount(ranks)).tolist()


class ColumnStore(dict[int, LocalColumn]):
    """One leader's rows of each block, by the block's id."""

    def rows(self, location: Location, rows: np.ndarray) -> LocalColumn:
        """The given batch rows of a column, all of which this rank has."""
        blocks, places_here = location.block[rows], location.row[rows]
        parts, order = list[LocalColumn](), []
        for block in np.unique(blocks).tolist():
            chosen = np.flatnonzero(blocks == block)
            stored = self[block]
            whole = len(chosen) == len(stored) and np.array_equal(places_here[chosen], np.arange(len(stored)))
            parts.append(stored if whole else stored.take(places_here[chosen]))
            order.append(chosen)
        return merge_rows(parts, order)


def merge_rows(parts: list[LocalColumn], positions: list[np.ndarray]) -> LocalColumn:
    """Join blocks whose rows belong at the given positions of the result."""
    if not parts:
        return Ragged.from_rows([])
    order = np.concatenate(positions)
    joined = parts[0] if len(parts) == 1 else type(parts[0]).concat(parts)  # type: ignore[arg-type]
    if np.array_equal(order, np.arange(len(order))):
        return joined
    return joined.take(np.argsort(order, kind="stable"))
