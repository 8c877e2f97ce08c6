"""Latency, bandwidth and clock offsets between ranks, measured by MPI messages, and the outliers among them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcrl.runtime.mpi import all_gather_object, barrier, wait, wait_all

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T", bound=Hashable)
Pair = tuple[int, int]  # of nodes

PINGS = 20
MESSAGE = 4 * 2**20  # bytes
MESSAGES = 8  # the fastest one counts; the first one also connects
SLOW = 2.0  # times slower than the median
LATE = 5.0  # times the median latency, because small messages vary much more


def ring_latencies(comm: MPI.Intracomm) -> list[float]:
    """Seconds that a small message takes from each rank to the next one, from the last one to rank 0. Collective.

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
    return all_gather_object(comm, mine)


def pair_bandwidths(comm: MPI.Intracomm, nodes: Sequence[int]) -> dict[Pair, float]:
    """Bytes per second in each direction, with both in use, between pairs of the ranks `nodes`, one of each node.

    The keys are pairs of indices into `nodes`. Disjoint pairs are measured at the same time. Collective over `comm`.
    """
    mine: dict[Pair, float] = {}
    for pairs in rounds(len(nodes)):
        for pair in pairs:
            ranks = [nodes[place] for place in pair]
            if comm.rank in ranks:
                mine[pair] = _bandwidth(comm, ranks[1] if comm.rank == ranks[0] else ranks[0])
    found: dict[Pair, float] = {}
    for part in all_gather_object(comm, mine):
        found |= {pair: min(speed, found.get(pair, speed)) for pair, speed in part.items()}
    return found


def clock_offsets(comm: MPI.Intracomm, nodes: Sequence[int]) -> list[float]:
    """Seconds by which the clock of each of these ranks is ahead of rank 0's, within half a round trip. Collective."""
    found = [0.0 for _ in nodes]
    for place, rank in enumerate(nodes):
        if rank == 0:
            continue
        if comm.rank == 0:
            found[place] = _ping(comm, rank)[1]
        if comm.rank == rank:
            _answer(comm, 0)
    return all_gather_object(comm, found)[0]


def _ping(comm: MPI.Intracomm, peer: int) -> tuple[float, float]:
    """The shortest round trip, and by how much the peer's clock was ahead in it, in seconds."""
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


def rounds(count: int) -> list[list[Pair]]:
    """All pairs of `count` nodes, in rounds of disjoint pairs: count - 1 rounds, or count if it is odd.

    The circle method of round-robin tournaments: one node stays, the others rotate by one place between rounds.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def deviants(values: Sequence[T]) -> tuple[T, list[int]]:
    """The most common value, the first of equally common ones, and the indices of other values."""
    common = Counter(values).most_common(1)[0][0]
    return common, [index for index, value in enumerate(values) if value != common]


def slow_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[int]:
    """Nodes that are slow with every partner. Needs three nodes: of two, either may be the slow one."""
    if count < 3:
        return []
    best = best_of_nodes(bandwidth, count)
    return [node for node in range(count) if best[node] < median(best) / SLOW]


def slow_pairs(bandwidth: Mapping[Pair, float], count: int) -> list[Pair]:
    """Slow pairs of nodes that are both fast with other nodes."""
    best = best_of_nodes(bandwidth, count)
    return [pair for pair, found in bandwidth.items() if found < min(best[pair[0]], best[pair[1]]) / SLOW]


def best_of_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[float]:
    """Bandwidth of each node with its fastest partner."""
    return [max((found for pair, found in bandwidth.items() if node in pair), default=0.0) for node in range(count)]


def late_links(seconds: Sequence[float], kinds: Sequence[bool]) -> list[int]:
    """Links whose latency is far above the median of their kind (inside a node, between nodes)."""
    usual = {kind: median(s for s, other in zip(seconds, kinds, strict=True) if other == kind) for kind in set(kinds)}
    return [link for link, kind in enumerate(kinds) if seconds[link] > LATE * usual[kind]]
