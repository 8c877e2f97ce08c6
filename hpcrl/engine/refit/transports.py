"""Transports of a refit: which one each transfer takes, windows of shared memory, and NCCL's messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engine.refit.messages import (
    Buffers,
    MessageTransport,
    Moves,
    Part,
    RequestLoop,
    Weights,
    destination_part,
    messages,
    pack,
    pages,
    source_part,
    unpack,
)
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.kernels.pack import RepeatedCopies
from hpcrl.runtime import platform
from hpcrl.runtime.mpi import all_gather_object, barrier, broadcast_object, create_group, wait

if TYPE_CHECKING:
    from mpi4py import MPI


READY, DONE = 1, 2  # tags
HALVES = 2


class WindowTransport:
    """Moves between ranks of one node, through MPI shared memory.

    Each rank packs a rectangle once into its own window, and every rank that needs the rectangle copies it from there
    to its destination. A rank has one window, allocated once and kept. A page fills one half of it, so that the next
    page is packed while others still read this one. Empty messages announce that a page is ready, and that its reader
    is done.

    `comm` has ranks of one node and is freed with the windows; `sends` and `receives` are by its ranks. `max_bytes`
    bounds this rank's window. Construction and `close` are collective over `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, sends: Moves, receives: Moves, dtype: torch.dtype, max_bytes: int) -> None:
        from mpi4py import MPI

        self._comm, self._dtype = comm, dtype
        published, read = pages(sends, max_bytes // HALVES // dtype.itemsize * dtype.itemsize)
        self._parts = [page.parts for page in published]
        self._readers = [sorted(page.readers) for page in published]
        sizes = [max((page.nbytes for page in published[half::HALVES]), default=0) for half in range(HALVES)]
        starts = [0, sizes[0]]
        self.nbytes = sum(sizes)
        barrier(comm)  # Allocate_shared spins until all ranks are here
        self._window = MPI.Win.Allocate_shared(self.nbytes, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        own_memory = _memory(self._window, comm.rank)
        self._halves = [own_memory[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
        in_window = {
            reader: [
                [part._replace(offset=part.offset + starts[page % HALVES]) for part in parts]
                for page, parts in sorted(by_page.items())
            ]
            for reader, by_page in read.items()
        }
        by_sender = all_gather_object(comm, in_window)
        self._senders: dict[int, list[list[Part]]] = {sender: by_sender[sender][comm.rank] for sender in receives}
        self._windows = {sender: _memory(self._window, sender) for sender in self._senders}

    def start(self, loop: RequestLoop, source: Weights, destination: Buffers) -> None:
        """Start one refit; `loop` completes it, after the last read from this rank's window."""
        self._packed = 0  # pages
        self._reading = [0] * HALVES  # number of ranks that still read each half
        for sender, pages_left in self._senders.items():
            self._await(loop, sender, iter(pages_left), destination)
        self._pack(loop, source)

    def _pack(self, loop: RequestLoop, source: Weights) -> None:
        while self._packed < len(self._parts) and self._reading[self._packed % HALVES] == 0:
            half, readers = self._packed % HALVES, self._readers[self._packed]
            pack(self._parts[self._packed], source, self._halves[half], self._dtype)
            self._window.Sync()
            self._reading[half] = len(readers)
            self._packed += 1
            for reader in readers:
                loop.add(self._comm.Isend(_nothing(), reader, READY))
                release = partial(self._release, half, loop, source)
                loop.add(self._comm.Irecv(_nothing(), reader, DONE), release)

    def _release(self, half: int, loop: RequestLoop, source: Weights) -> None:
        self._reading[half] -= 1
        self._pack(loop, source)

    def _await(self, loop: RequestLoop, sender: int, pages_left: Iterator[list[Part]], destination: Buffers) -> None:
        """Wait for the next page of `sender`, if there is one."""
        parts = next(pages_left, None)
        if parts is None:
            return

        def read() -> None:
            self._window.Sync()
            unpack(parts, self._windows[sender], destination, self._dtype)
            loop.add(self._comm.Isend(_nothing(), sender, DONE))
            self._await(loop, sender, pages_left, destination)

        loop.add(self._comm.Irecv(_nothing(), sender, READY), read)

    def close(self) -> None:
        """Free the windows."""
        barrier(self._comm)
        self._windows, self._halves = {}, []
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()


def shared_memory_left() -> int:
    """Return the bytes that are free where MPI libraries keep shared memory.

    A container may have 64 MiB only, and writing beyond the limit kills the process.
    """
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _memory(window: MPI.Win, rank: int) -> Tensor:
    """Return a rank's part of the window, (bytes,) uint8."""
    buffer, _ = window.Shared_query(rank)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8))  # type: ignore[call-overload]


def _nothing() -> list[Any]:
    from mpi4py import MPI

    return [bytearray(), 0, MPI.BYTE]


def nodes_of(comm: MPI.Intracomm) -> list[int]:
    """Return, for each rank of `comm`, the first rank with which it shares memory. Collective."""
    from mpi4py import MPI

    barrier(comm)  # Split_type spins until all ranks are here
    node: MPI.Intracomm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)  # type: ignore[assignment]
    first = broadcast_object(node, comm.rank)
    node.Free()
    return all_gather_object(comm, first)


class DeviceTransport:
    """NCCL point-to-point between GPUs; with gloo groups it runs on the CPU.

    A slice is sent and received directly if it is contiguous and of the engine's dtype, and through a buffer otherwise,
    which on a GPU takes one launch to fill and one to empty. The n-th messages of all pairs form one batch, so that
    batches cannot deadlock.

    `group` has the refit's ranks; `sends` and `receives` are by world rank. `max_bytes` bounds a message between two
    ranks and is the same on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, sends: Moves, receives: Moves, dtype: torch.dtype, max_bytes: int
    ) -> None:
        self._group, self._dtype = group, dtype
        self._sends = {peer: messages(moves, max_bytes) for peer, moves in sends.items()}
        self._receives = {peer: messages(moves, max_bytes) for peer, moves in receives.items()}
        self._num_batches = max(
            (len(buffers) for buffers in (*self._sends.values(), *self._receives.values())), default=0
        )
        self._packs, self._unpacks = ([RepeatedCopies() for _ in range(self._num_batches)] for _ in range(2))
        self.nbytes = 0  # staged at most in any batch so far
        # The first operation of a group connects it, and not every rank takes part in the first batch.
        dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)

    def start(self, loop: RequestLoop, source: Weights, destination: Buffers) -> None:
        """Queue one refit on the current CUDA stream."""
        for number in range(self._num_batches):
            self._batch(number, source, destination)

    def close(self) -> None:
        pass

    def _batch(self, number: int, source: Weights, destination: Buffers) -> None:
        leaving = [(peer, source_part(source, part.move)) for peer, part in _parts(self._sends, number)]
        arriving = [(peer, destination_part(destination, part.move)) for peer, part in _parts(self._receives, number)]
        if not leaving and not arriving:
            return
        sources, destinations = [piece for _, piece in leaving], [piece for _, piece in arriving]
        sent, received = self._as_sent(sources, destinations)
        _copy(self._packs[number], sources, sent)
        operations = [
            dist.P2POp(operation, values, peer, self._group)
            for operation, pieces, tensors in ((dist.isend, leaving, sent), (dist.irecv, arriving, received))
            for (peer, _), values in zip(pieces, tensors, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _copy(self._unpacks[number], received, destinations)

    def _as_sent(self, *pieces: list[Tensor] | list[Tensor | Fp8Matrix]) -> list[list[Tensor]]:
        """Return each piece, or a place for it in the batch's buffer, in the engine's dtype and without gaps."""
        sizes = [piece.numel() for side in pieces for piece in side if not self._is_direct(piece)]
        device = next(piece.device for side in pieces for piece in side)
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=device)
        self.nbytes = max(self.nbytes, buffer.nbytes)
        places = iter(buffer.split(sizes))
        return [
            [piece if self._is_direct(piece) else next(places).view(piece.shape) for piece in side] for side in pieces
        ]

    def _is_direct(self, piece: Tensor | Fp8Matrix) -> TypeGuard[Tensor]:
        return isinstance(piece, Tensor) and piece.dtype == self._dtype and piece.is_contiguous()


def _copy(copies: RepeatedCopies, sources: list[Tensor], destinations: Sequence[Tensor | Fp8Matrix]) -> None:
    """Copy the pairs that are not one tensor."""
    pairs: list[tuple[Tensor, Tensor | Fp8Matrix]] = [
        pair for pair in zip(sources, destinations, strict=True) if pair[0] is not pair[1]
    ]
    copies.run([tensor for pair in pairs for tensor in pair], lambda: pairs)


def _parts(peers: dict[int, list[list[Part]]], number: int) -> list[tuple[int, Part]]:
    return [(peer, part) for peer, buffers in peers.items() if number < len(buffers) for part in buffers[number]]


# Measured on two cores with 480 MB of L3, 105 MB packed per rank: windows of 16 MiB take 0.13 s, of 256 MiB 0.19 s,
# because packed values leave the caches before they are read; of 4 MiB 0.16 s, because each page wakes up its readers.
LARGEST_WINDOW = 16 * 2**20  # bytes
SMALLEST_WINDOW = 2**16  # bytes; below that messages are as fast
TAG = 7302

log = logging.getLogger(__name__)


Transport: TypeAlias = WindowTransport | MessageTransport | DeviceTransport


def make_transports(
    comm: MPI.Intracomm,
    ranks: tuple[int, ...],
    near: tuple[int, ...],
    sends: Moves,
    receives: Moves,
    dtype: torch.dtype,
    max_bytes: int,
    device_group: dist.ProcessGroup | None,
) -> list[Transport]:
    """Make the transports of this rank's transfers, with at most `max_bytes` of buffers. Collective over `comm`.

    `comm` has `ranks`, in that order; `near` are those that share memory with this rank. Raises ValueError if
    `max_bytes` is too small for the number of peers.
    """
    if device_group is not None:
        limit = _message_bytes(comm, max_bytes, len(sends) + len(receives), dtype)
        return [DeviceTransport(device_group, sends, receives, dtype, limit)]
    node = create_group(comm, [ranks.index(rank) for rank in near], TAG)
    room = _smallest(node, shared_memory_left() // (2 * len(near)))
    if room < min(SMALLEST_WINDOW, max_bytes):
        if node.rank == 0:
            log.warning(
                "refit: /dev/shm is almost full; ranks of this node exchange weights by MPI messages, which is slower"
            )
        node.Free()
        near = ()
    nearby = {rank: number for number, rank in enumerate(near)}
    far = {rank: number for number, rank in enumerate(ranks) if rank not in nearby}
    near_sends, near_receives, far_sends, far_receives = (
        {place[rank]: move for rank, move in moves.items() if rank in place}
        for place in (nearby, far)
        for moves in (sends, receives)
    )
    has_far = bool(far_sends or far_receives)
    share = max_bytes // 2 if has_far and near_sends else max_bytes
    limit = _message_bytes(comm, share, len(far_sends) + len(far_receives), dtype)
    transports: list[Transport] = []
    if near:
        largest = min(share, room, LARGEST_WINDOW)
        transports.append(WindowTransport(node, near_sends, near_receives, dtype, largest))
    if has_far:
        transports.append(MessageTransport(comm, far_sends, far_receives, dtype, limit))
    return transports


def _message_bytes(comm: MPI.Intracomm, max_bytes: int, num_buffers: int, dtype: torch.dtype) -> int:
    """Return a message size that keeps every rank within its memory, for any number of peers."""
    limit = _smallest(comm, max_bytes // max(1, num_buffers)) // dtype.itemsize * dtype.itemsize
    if limit < dtype.itemsize:
        raise ValueError(f"bucket_bytes={max_bytes} do not hold one element in each of {num_buffers} buffers")
    return limit


def _smallest(comm: MPI.Intracomm, number: int) -> int:
    """Return the minimum over the ranks of `comm`."""
    from mpi4py import MPI

    found = np.array([number], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, found, MPI.MIN))
    return int(found[0])
