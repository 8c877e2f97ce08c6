"""Where columns live, and how they go from one home rank to another.

Token-level columns stay in host memory of home ranks. Rank 0 knows a column by its `Location`: for every row the
command that wrote it, the rank that holds it and its place there. Everything about a move follows from a location and a
destination by pure functions, so that sender and receiver agree without talking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpcrl.batch.ragged import Ragged


class Slot:
    """Rank 0's hold on what one command left on the ranks; when the last hold is gone, the ranks may forget it."""

    def __init__(self, command: int) -> None:
        self.command = command


@dataclass(frozen=True)
class Location:
    """Where the rows of a column are. All arrays int32 (N,).

    writer: id of the command that made the row; rank: world rank that holds it; row: its place in that rank's block.
    """

    writer: np.ndarray
    rank: np.ndarray
    row: np.ndarray
    slots: tuple[Slot, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.rank)

    def __getstate__(self) -> dict[str, Any]:
        """What travels: constant and derivable arrays are left out."""
        writer = int(self.writer[0]) if len(self) and (self.writer == self.writer[0]).all() else self.writer
        row = None if np.array_equal(self.row, places(self.rank)) else self.row
        return {"writer": writer, "rank": self.rank, "row": row}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rank, row, writer = state["rank"], state["row"], state["writer"]
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "row", places(rank) if row is None else row)
        object.__setattr__(self, "writer", np.full(len(rank), writer, np.int32) if isinstance(writer, int) else writer)
        object.__setattr__(self, "slots", ())

    @classmethod
    def of_command(cls, slot: Slot, rank: np.ndarray) -> Location:
        """Rows written by one command: each rank's block holds its rows in batch order."""
        return cls(np.full(len(rank), slot.command, np.int32), rank, places(rank), (slot,))

    def take(self, rows: np.ndarray) -> Location:
        return Location(self.writer[rows], self.rank[rows], self.row[rows], self.slots)

    @staticmethod
    def concat(parts: Sequence[Location]) -> Location:
        slots = tuple({slot.command: slot for part in parts for slot in part.slots}.values())
        writer, rank, row = (np.concatenate([getattr(p, name) for p in parts]) for name in ("writer", "rank", "row"))
        return Location(writer, rank, row, slots)


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
    """A column of rank 0's batch whose rows are on home ranks (see `hpcrl.batch.data_proto.RemoteColumn`)."""

    def __init__(self, name: str, locations: list[Location], fetch: Callable[[PlacedColumn], Ragged]) -> None:
        self.name = name
        self.locations = locations  # the same rows may stand in several places; the first is where they were written
        self._fetch = fetch

    def __len__(self) -> int:
        return len(self.locations[0])

    def take(self, rows: np.ndarray) -> PlacedColumn:
        return PlacedColumn(self.name, [location.take(rows) for location in self.locations], self._fetch)

    def concat(self, others: Sequence[Any]) -> PlacedColumn:
        parts: list[PlacedColumn] = [self, *others]
        return PlacedColumn(self.name, [Location.concat([part.locations[0] for part in parts])], self._fetch)

    def fetch(self) -> Ragged:
        """Bring all rows to rank 0, for a person who wants to look."""
        return self._fetch(self)

    def nearest(self, ranks: np.ndarray) -> Location:
        """The location from which the fewest rows have to move to `ranks`."""
        return min(self.locations, key=lambda location: int((location.rank != ranks).sum()))


@dataclass(frozen=True)
class Read:
    """A column that a command reads: under which name it is stored, and where."""

    column: str
    stored_as: str
    location: Location

    def moves(self, destination: np.ndarray) -> bool:
        """Whether any row moves: then all rows are stored again at their destination, as columns of this command."""
        return bool((self.location.rank != destination).any())


def rows_between(location: Location, destination: np.ndarray, sender: int, receiver: int) -> np.ndarray:
    """Batch rows that `sender` holds and `receiver` needs, in batch order."""
    return np.flatnonzero((location.rank == sender) & (destination == receiver))


def receivers_of(reads: Iterable[Read], destination: np.ndarray, sender: int) -> list[int]:
    """Ranks other than `sender` to which it owes rows of any column."""
    owed = [destination[read.location.rank == sender] for read in reads]
    found = set(np.unique(np.concatenate(owed)).tolist()) if owed else set()
    return sorted(found - {sender})


def senders_of(reads: Iterable[Read], destination: np.ndarray, receiver: int) -> list[int]:
    """Ranks other than `receiver` from which it gets rows of any column."""
    owing = [read.location.rank[destination == receiver] for read in reads]
    found = set(np.unique(np.concatenate(owing)).tolist()) if owing else set()
    return sorted(found - {receiver})


class ColumnStore:
    """The columns that one home rank holds: (command, name) -> block of rows."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, str], Ragged] = {}

    def put(self, command: int, name: str, block: Ragged) -> None:
        self._blocks[command, name] = block

    def forget(self, command: int) -> None:
        for key in [key for key in self._blocks if key[0] == command]:
            del self._blocks[key]

    def rows(self, read: Read, rows: np.ndarray) -> Ragged:
        """The given batch rows of a column, all of which this rank holds."""
        writers, places_here = read.location.writer[rows], read.location.row[rows]
        parts, order = [], []
        for writer in np.unique(writers).tolist():
            chosen = np.flatnonzero(writers == writer)
            block = self._blocks[writer, read.stored_as]
            whole = len(chosen) == len(block) and np.array_equal(places_here[chosen], np.arange(len(block)))
            parts.append(block if whole else block.take(torch.from_numpy(places_here[chosen].astype(np.int64))))
            order.append(chosen)
        return merge_rows(parts, order)

    @property
    def num_bytes(self) -> int:
        return sum(block.values.nbytes + block.offsets.nbytes for block in self._blocks.values())


def merge_rows(parts: list[Ragged], positions: list[np.ndarray]) -> Ragged:
    """Join blocks whose rows belong at the given positions of the result."""
    if not parts:
        return Ragged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
    order = np.concatenate(positions)
    joined = parts[0] if len(parts) == 1 else Ragged.concat(parts)
    if np.array_equal(order, np.arange(len(order))):
        return joined
    return joined.take(torch.from_numpy(np.argsort(order, kind="stable")))


# A packed message: per column int64 [dtype code, rows], int64 lengths, then the values.
_DTYPES = (np.dtype("f4"), np.dtype("i4"), np.dtype("i8"), np.dtype("f8"), np.dtype("u1"), np.dtype("?"))


def pack(columns: Sequence[Ragged]) -> np.ndarray:
    """Columns as one uint8 array."""
    parts = []
    for column in columns:
        values, lengths = column.values.contiguous().numpy(), column.lengths.numpy()
        head = np.array([_DTYPES.index(values.dtype), len(column)], np.int64)
        parts += [head.view(np.uint8), lengths.view(np.uint8), values.view(np.uint8)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def unpack(message: np.ndarray, count: int) -> list[Ragged]:
    """The columns of `pack`, in memory of their own."""
    at = 0

    def read(dtype: np.dtype, size: int) -> np.ndarray:
        nonlocal at
        begin, at = at, at + size * dtype.itemsize
        return np.frombuffer(message[begin:at].tobytes(), dtype).copy()

    columns = []
    for _ in range(count):
        code, rows = read(np.dtype("i8"), 2).tolist()
        lengths = read(np.dtype("i8"), rows)
        values = read(_DTYPES[code], int(lengths.sum()))
        columns.append(Ragged.from_lengths(torch.from_numpy(values), torch.from_numpy(lengths)))
    return columns
