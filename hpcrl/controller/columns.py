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

    def __getstate__(self) -> dict[str, Any]:
        return self._compact

    @cached_property
    def _compact(self) -> dict[str, Any]:
        """The pickled state, without constant and derivable arrays: it is sent to many ranks in many commands."""
        block = int(self.block[0]) if len(self) and (self.block == self.block[0]).all() else self.block
        row = None if np.array_equal(self.row, places(self.rank)) else self.row
        return {"block": block, "rank": self.rank, "row": row}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rank, row, block = state["rank"], state["row"], state["block"]
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "row", places(rank) if row is None else row)
        object.__setattr__(self, "block", np.full(len(rank), block, np.int32) if isinstance(block, int) else block)
        object.__setattr__(self, "references", ())

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
    return sorted({rank for part in parts for rank in np.unique(part).tolist()} - {without})


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
