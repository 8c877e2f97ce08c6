"""Offsets of the nodes' monotonic clocks, measured by messages between rank 0 and one rank of each other node."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.runtime.mpi import all_gather_object, broadcast_object, wait

if TYPE_CHECKING:
    from mpi4py import MPI

ROUND_TRIPS = 10
TAG = 7  # on the communicator of commands, results and rows
_TIME = struct.Struct("<d")


class Alignment(NamedTuple):
    """A measurement of this rank's clock: it shows `at` when rank 0's shows `at - offset`. error: the largest possible
    one, half of the shortest round trip. Seconds."""

    at: float
    offset: float
    error: float


class ClockAligner:
    """Measures by how much this rank's clock is ahead of rank 0's.

    Rank 0 reads its clock (t0), sends a message, and reads the clock again when the answer arrives (t2); the answer has
    the other rank's clock (t1). Its offset is t1 - (t0 + t2) / 2 with an error of at most (t2 - t0) / 2: Cristian,
    "Probabilistic clock synchronization", Distributed Computing 3 (1989). Of ROUND_TRIPS the one with the shortest
    round trip counts, as in NTP's clock filter (RFC 5905, section 10). CLOCK_MONOTONIC is one clock for all processes
    of a kernel, so ranks that share a kernel with rank 0 have offset 0, and one rank measures for each other kernel.

    The clocks drift apart by parts per million, which two measurements in a run show; readers interpolate linearly.
    Between slices, which start at different times on different nodes, the nodes' wall clocks count.
    """

    def __init__(
        self, comm: MPI.Intracomm, clock: Callable[[], float] = time.perf_counter, kernel: str | None = None
    ) -> None:
        """kernel: equal on ranks that share a clock. Collective over `comm`."""
        self._comm, self._clock = comm, clock
        kernels = all_gather_object(comm, kernel or kernel_id())
        self._leaders = sorted({kernels.index(one) for one in kernels} - {0})  # one rank of each other kernel
        self._leader = kernels.index(kernels[comm.rank])

    def measure(self) -> Alignment:
        """Measure this rank's clock. Collective over the communicator."""
        found: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        for leader in self._leaders:
            if self._comm.rank == 0:
                found[leader] = min((self._ask(leader) for _ in range(ROUND_TRIPS)), key=lambda pair: pair[1])
            elif self._comm.rank == leader:
                for _ in range(ROUND_TRIPS):
                    self._answer()
        offset, error = broadcast_object(self._comm, found)[self._leader]
        return Alignment(self._clock(), offset, error)

    def _ask(self, rank: int) -> tuple[float, float]:
        """(offset, error) by one round trip."""
        answer = bytearray(_TIME.size)
        arrived = self._comm.Irecv(answer, source=rank, tag=TAG)
        sent_at = self._clock()
        wait(self._comm.Isend(bytearray(1), dest=rank, tag=TAG))
        wait(arrived)
        back_at = self._clock()
        (other,) = _TIME.unpack(answer)
        return other - (sent_at + back_at) / 2, (back_at - sent_at) / 2

    def _answer(self) -> None:
        wait(self._comm.Irecv(bytearray(1), source=0, tag=TAG))
        wait(self._comm.Isend(_TIME.pack(self._clock()), dest=0, tag=TAG))


def kernel_id() -> str:
    """A name of the running kernel: containers of one node share it, and its clocks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
