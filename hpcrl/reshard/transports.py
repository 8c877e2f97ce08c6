"""Which way each transfer of a refit goes, and how the ways share its memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from hpcrl.reshard.events import Events
from hpcrl.reshard.messages import Messages
from hpcrl.reshard.nccl import DeviceMessages
from hpcrl.reshard.planner import Move
from hpcrl.reshard.rectangles import Weights
from hpcrl.reshard.windows import SharedWindows, shared_memory_left
from hpcrl.runtime.mpi import create_group, wait

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

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
