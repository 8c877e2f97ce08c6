"""How fast ranks reach each other, and how far their nodes' clocks are apart: measurements by MPI messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.launch.collectives import barrier, exchange
from hpcrl.launch.outliers import Pair, rounds
from hpcrl.launch.waiting import wait, wait_all

if TYPE_CHECKING:
    from mpi4py import MPI

PINGS = 20
MESSAGE = 4 * 2**20  # bytes
MESSAGES = 8  # of which the fastest counts; the first one also connects


def ring_latencies(comm: MPI.Intracomm) -> list[float]:
    """Seconds that a small message takes from rank r to the next one, the last one's to rank 0. Collective.

    Links that share a rank are measured one after the other.
    """
    mine, size = 0.0, comm.size
    if size == 1:
        return []
    for turn in range(3):
        for link in (comm.rank, (comm.rank - 1) % size):
            if turn == (2 if size % 2 and link == size - 1 else link % 2):
                if link == comm.rank:
                    mine = _ping(comm, (link + 1) % size)[0] / 2
                else:
                    _answer(comm, link)
        barrier(comm)
    return exchange(comm, mine)


def pair_bandwidths(comm: MPI.Intracomm, nodes: Sequence[int]) -> dict[Pair, float]:
    """Bytes per second in each direction, while both are under way, between the ranks that speak for the nodes.

    Keyed by places in `nodes`. Collective over `comm`; as many pairs at once as there are.
    """
    mine: dict[Pair, float] = {}
    for pairs in rounds(len(nodes)):
        for pair in pairs:
            ranks = [nodes[place] for place in pair]
            if comm.rank in ranks:
                mine[pair] = _bandwidth(comm, ranks[1] if comm.rank == ranks[0] else ranks[0])
    found: dict[Pair, float] = {}
    for part in exchange(comm, mine):
        found |= {pair: min(speed, found.get(pair, speed)) for pair, speed in part.items()}
    return found


def clock_offsets(comm: MPI.Intracomm, nodes: Sequence[int]) -> list[float]:
    """Seconds by which the clock of each of these ranks is ahead of rank 0's, to half a round trip. Collective."""
    found = [0.0 for _ in nodes]
    for place, rank in enumerate(nodes):
        if rank == 0:
            continue
        if comm.rank == 0:
            found[place] = _ping(comm, rank)[1]
        if comm.rank == rank:
            _answer(comm, 0)
    return exchange(comm, found)[0]


def _ping(comm: MPI.Intracomm, peer: int) -> tuple[float, float]:
    """The shortest round trip, in seconds, and by how much the peer's clock was ahead then."""
    sent, answer, best = np.zeros(1), np.zeros(1), (np.inf, 0.0)
    for _ in range(PINGS):
        left, began = time.time(), time.perf_counter()
        wait_all([comm.Isend(sent, dest=peer), comm.Irecv(answer, source=peer)])
        took = time.perf_counter() - began
        best = min(best, (took, float(answer[0]) - left - took / 2))
    return best


def _answer(comm: MPI.Intracomm, peer: int) -> None:
    received = np.zeros(1)
    for _ in range(PINGS):
        wait(comm.Irecv(received, source=peer))
        wait(comm.Isend(np.array([time.time()]), dest=peer))


def _bandwidth(comm: MPI.Intracomm, peer: int) -> float:
    out, into, best = np.zeros(MESSAGE, np.uint8), np.empty(MESSAGE, np.uint8), np.inf
    for _ in range(MESSAGES):
        wait_all([comm.Isend(out[:1], dest=peer), comm.Irecv(into[:1], source=peer)])  # both are here
        began = time.perf_counter()
        wait_all([comm.Isend(out, dest=peer), comm.Irecv(into, source=peer)])
        best = min(best, time.perf_counter() - began)
    return MESSAGE / best
