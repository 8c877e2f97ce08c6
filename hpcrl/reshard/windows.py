"""Moves between ranks of one node, through MPI shared memory: each rank packs a rectangle once into a window of its
own, and every rank that needs it copies it from there straight to where it belongs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.reshard.buckets import Direction, Part, directed, pages
from hpcrl.reshard.messages import Events, Weights, pack, unpack
from hpcrl.reshard.planner import Move
from hpcrl.runtime.mpi import all_gather_object, barrier, broadcast_object, wait, wait_all

if TYPE_CHECKING:
    from mpi4py import MPI

READY, DONE, DIRECTIONS = 1, 2, 3  # tags
HALVES = 2


class SharedWindows:
    """One window per rank, allocated once and kept. A page fills one half of it, so that the next page is packed while
    others still read this one. Who may read, and who may overwrite, is told by empty messages.

    `comm` has ranks of one node, and is freed with the windows; `place` maps world ranks to its ranks; `sends` and
    `receives` are keyed by world rank. `max_bytes` bounds this rank's window. Making and closing are collective over
    `comm`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        place: dict[int, int],
        sends: dict[int, list[Move]],
        receives: dict[int, list[Move]],
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        from mpi4py import MPI

        self._comm, self._dtype = comm, dtype
        published, directions = pages(sends, max_bytes // HALVES // dtype.itemsize * dtype.itemsize)
        self._parts = [page.parts for page in published]
        self._readers = [sorted(place[reader] for reader in page.readers) for page in published]
        sizes = [max((page.nbytes for page in published[half::HALVES]), default=0) for half in range(HALVES)]
        starts = [0, sizes[0]]
        self.nbytes = sum(sizes)
        barrier(comm)  # Allocate_shared spins until all ranks are here
        self._window: MPI.Win | None = MPI.Win.Allocate_shared(self.nbytes, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        mine = _memory(self._window, comm.rank)
        self._halves = [mine[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
        self._senders = self._exchange(
            {place[reader]: _absolute(its, starts) for reader, its in directions.items()},
            {place[sender]: moves for sender, moves in receives.items()},
        )
        self._windows = {sender: _memory(self._window, sender) for sender in self._senders}

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Begin one refit; `events` carries it on. It ends when nobody reads from this rank's window any more."""
        self._packed = 0  # pages
        self._reading = [0] * HALVES  # ranks that are not done yet with each half
        for sender, theirs in self._senders.items():
            self._await(events, sender, iter(theirs), destination)
        self._pack(events, source)

    def _pack(self, events: Events, source: Weights) -> None:
        while self._packed < len(self._parts) and self._reading[self._packed % HALVES] == 0:
            half, readers = self._packed % HALVES, self._readers[self._packed]
            pack(self._parts[self._packed], source, self._halves[half], self._dtype)
            self._sync()
            self._reading[half] = len(readers)
            self._packed += 1
            for reader in readers:
                events.add(self._comm.Isend(_nothing(), reader, READY))
                release = partial(self._release, half, events, source)
                events.add(self._comm.Irecv(_nothing(), reader, DONE), release)

    def _release(self, half: int, events: Events, source: Weights) -> None:
        self._reading[half] -= 1
        self._pack(events, source)

    def _await(self, events: Events, sender: int, theirs: Iterator[list[Part]], destination: Weights) -> None:
        """The next page of `sender`, if there is one more."""
        parts = next(theirs, None)
        if parts is None:
            return

        def read() -> None:
            self._sync()
            unpack(parts, self._windows[sender], destination, self._dtype)
            events.add(self._comm.Isend(_nothing(), sender, DONE))
            self._await(events, sender, theirs, destination)

        events.add(self._comm.Irecv(_nothing(), sender, READY), read)

    def _sync(self) -> None:
        assert self._window is not None
        self._window.Sync()

    def close(self) -> None:
        """Give the memory back."""
        if self._window is not None:
            barrier(self._comm)
            self._windows, self._halves = {}, []
            self._window.Unlock_all()
            self._window.Free()
            self._window = None
            self._comm.Free()

    def _exchange(
        self, directions: dict[int, np.ndarray], receives: dict[int, list[Move]]
    ) -> dict[int, list[list[Part]]]:
        """Tell readers where they find their moves; per sender, its pages that this rank reads from, in order."""
        counts = {reader: np.array([len(its)], np.int64) for reader, its in directions.items()}
        requests = [self._comm.Isend(count, reader, DIRECTIONS) for reader, count in counts.items()]
        requests += [self._comm.Isend(its, reader, DIRECTIONS) for reader, its in directions.items()]
        senders = {}
        for sender, moves in receives.items():
            count = np.empty(1, np.int64)
            wait(self._comm.Irecv(count, sender, DIRECTIONS))
            table = np.empty((int(count[0]), len(Direction._fields)), np.int64)
            wait(self._comm.Irecv(table, sender, DIRECTIONS))
            found = directed(moves, (Direction(*row) for row in table.tolist()))
            senders[sender] = [found[page] for page in sorted(found)]
        wait_all(requests)
        return senders


def shared_memory_left() -> int:
    """Bytes that may still be taken where MPI libraries keep shared memory; a container may have 64 MiB only, and
    touching more than there is kills the process."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _memory(window: MPI.Win, rank: int) -> Tensor:
    """A rank's part of the window, (bytes,) uint8."""
    buffer, _ = window.Shared_query(rank)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8))  # type: ignore[call-overload]


def _absolute(directions: list[Direction], starts: list[int]) -> np.ndarray:
    """Offsets counted from the start of the window: int64 (n, fields)."""
    moved = [its._replace(offset=its.offset + starts[its.page % HALVES]) for its in directions]
    return np.array(moved, np.int64).reshape(len(moved), len(Direction._fields))


def _nothing() -> list[Any]:
    from mpi4py import MPI

    return [bytearray(), 0, MPI.BYTE]


def nodes_of(comm: MPI.Intracomm) -> list[int]:
    """For each rank of `comm` the first rank with which it shares memory. Collective."""
    from mpi4py import MPI

    barrier(comm)  # Split_type spins until all ranks are here
    node: MPI.Intracomm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)  # type: ignore[assignment]
    first = broadcast_object(node, comm.rank)
    node.Free()
    return all_gather_object(comm, first)
