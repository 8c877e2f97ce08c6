"""Transports of a refit: which one each transfer takes, how they share memory, and NCCL's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.kernels.pack import RepeatedCopies
from hpcrl.reshard.buckets import Part, messages
from hpcrl.reshard.messages import Events, Messages, Weights, destination_part, source_part
from hpcrl.reshard.planner import Move
from hpcrl.reshard.windows import SharedWindows, shared_memory_left
from hpcrl.runtime import platform
from hpcrl.runtime.mpi import create_group, wait

if TYPE_CHECKING:
    from mpi4py import MPI


class DeviceMessages:
    """NCCL point-to-point between GPUs. With gloo groups it runs on the CPU.

    Pieces go from slice to slice where both ends are contiguous and of the engine's dtype, and through a buffer on
    the side where not, which on a GPU one launch fills and one empties. The n-th messages of all pairs make one batch,
    so that batches cannot wait in a circle.

    `group` has the refit's ranks; `sends` and `receives` are by world rank. `max_bytes` bounds a message between two
    ranks, and is the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: dict[int, list[Move]],
        receives: dict[int, list[Move]],
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        self._group, self._dtype = group, dtype
        self._sends = {peer: messages(moves, max_bytes) for peer, moves in sends.items()}
        self._receives = {peer: messages(moves, max_bytes) for peer, moves in receives.items()}
        self._num_batches = max((len(its) for its in (*self._sends.values(), *self._receives.values())), default=0)
        self._packs, self._unpacks = ([RepeatedCopies() for _ in range(self._num_batches)] for _ in range(2))
        self.nbytes = 0  # staged at most in any batch so far
        # The first operation of a group connects it, and not every rank takes part in the first batch.
        dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Queue one refit on the current stream."""
        for number in range(self._num_batches):
            self._batch(number, source, destination)

    def close(self) -> None:
        pass

    def _batch(self, number: int, source: Weights, destination: Weights) -> None:
        leaving = [(peer, source_part(source, part.move)) for peer, part in _parts(self._sends, number)]
        arriving = [(peer, destination_part(destination, part.move)) for peer, part in _parts(self._receives, number)]
        if not leaving and not arriving:
            return
        sources, destinations = [piece for _, piece in leaving], [piece for _, piece in arriving]
        sent, received = self._as_sent(sources, destinations)
        _copy(self._packs[number], sources, sent)
        operations = [
            dist.P2POp(operation, values, peer, self._group)
            for operation, pieces, its in ((dist.isend, leaving, sent), (dist.irecv, arriving, received))
            for (peer, _), values in zip(pieces, its, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _copy(self._unpacks[number], received, destinations)

    def _as_sent(self, *pieces: list[Tensor]) -> list[list[Tensor]]:
        """Each piece itself, or a place for it in the batch's buffer, in the engine's dtype and without gaps."""
        sizes = [piece.numel() for its in pieces for piece in its if not self._goes_itself(piece)]
        device = next(piece.device for its in pieces for piece in its)
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=device)
        self.nbytes = max(self.nbytes, buffer.nbytes)
        places = iter(buffer.split(sizes))
        return [
            [piece if self._goes_itself(piece) else next(places).view(piece.shape) for piece in its] for its in pieces
        ]

    def _goes_itself(self, piece: Tensor) -> bool:
        return piece.dtype == self._dtype and piece.is_contiguous()


def _copy(copies: RepeatedCopies, sources: list[Tensor], destinations: list[Tensor]) -> None:
    """Where they are not one and the same."""
    pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[0] is not pair[1]]
    copies.run([tensor for pair in pairs for tensor in pair], lambda: pairs)


def _parts(peers: dict[int, list[list[Part]]], number: int) -> list[tuple[int, Part]]:
    return [(peer, part) for peer, its in peers.items() if number < len(its) for part in its[number]]


Moves = dict[int, list[Move]]  # by the world rank of the other end

# Measured on two cores with 480 MB of L3, 105 MB packed per rank: windows of 16 MiB take 0.13 s, of 256 MiB 0.19 s, for
# what is packed leaves the caches before it is read; of 4 MiB 0.16 s, for each page costs its readers a wake-up.
LARGEST_WINDOW = 16 * 2**20  # bytes
SMALLEST_WINDOW = 2**16  # bytes; below that messages are no worse
TAG = 7302

log = logging.getLogger(__name__)


class Transport(Protocol):
    nbytes: int  # of its buffers

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Begin one refit; `events` carries it on."""
        ...

    def close(self) -> None: ...


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
    """The ways that this rank's transfers go, with at most `max_bytes` of buffers. Collective over `comm`.

    `comm` is that of `ranks`, in that order; `near` are those of them with which this one shares memory. Raises
    ValueError where `max_bytes` is too small for the number of peers.
    """
    if device_group is not None:
        limit = _message_bytes(comm, max_bytes, len(sends) + len(receives), dtype)
        return [DeviceMessages(device_group, sends, receives, dtype, limit)]
    place = {rank: number for number, rank in enumerate(ranks)}
    node = create_group(comm, [place[rank] for rank in near], TAG)
    room = _smallest(node, shared_memory_left() // (2 * len(near)))
    if room < min(SMALLEST_WINDOW, max_bytes):
        if node.rank == 0:
            log.warning(
                "refit: /dev/shm is almost full, so ranks of this node send messages; give it room to be faster"
            )
        node.Free()
        near = ()
    far = {rank for rank in (*sends, *receives) if rank not in near}
    far_sends, near_sends = _split(sends, far)
    far_receives, near_receives = _split(receives, far)
    share = max_bytes // 2 if far and near_sends else max_bytes
    limit = _message_bytes(comm, share, len(far_sends) + len(far_receives), dtype)
    made: list[Transport] = []
    if near:
        nearby = {rank: number for number, rank in enumerate(near)}
        largest = min(share, room, LARGEST_WINDOW)
        made.append(SharedWindows(node, nearby, near_sends, near_receives, dtype, largest))
    if far:
        made.append(Messages(comm, place, far_sends, far_receives, dtype, limit))
    return made


def _message_bytes(comm: MPI.Intracomm, max_bytes: int, num_buffers: int, dtype: torch.dtype) -> int:
    """A size of messages that leaves every rank within its memory, whatever its number of peers."""
    limit = _smallest(comm, max_bytes // max(1, num_buffers)) // dtype.itemsize * dtype.itemsize
    if limit < dtype.itemsize:
        raise ValueError(f"{max_bytes} bytes for a refit do not hold an element for each of {num_buffers} buffers")
    return limit


def _smallest(comm: MPI.Intracomm, number: int) -> int:
    """Over the ranks of `comm`."""
    from mpi4py import MPI

    found = np.array([number], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, found, MPI.MIN))
    return int(found[0])


def _split(moves: Moves, far: set[int]) -> tuple[Moves, Moves]:
    return (
        {rank: its for rank, its in moves.items() if rank in far},
        {rank: its for rank, its in moves.items() if rank not in far},
    )
