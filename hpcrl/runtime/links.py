"""How fast ranks reach each other, and how far their nodes' clocks are apart: measurements by MPI messages."""

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
    return all_gather_object(comm, mine)


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
    for part in all_gather_object(comm, mine):
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
    return all_gather_object(comm, found)[0]


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


T = TypeVar("T", bound=Hashable)
Pair = tuple[int, int]

SLOW = 2.0  # times slower than usual
LATE = 5.0  # times the usual latency: small messages vary much more


def rounds(count: int) -> list[list[Pair]]:
    """All pairs of `count`, in rounds of pairs that have nobody in common: count - 1 rounds, count where it is odd.

    The circle method: one stands still, the others move on by one place between rounds.
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
    """The commonest value, the first of equally common ones, and the places where there is another."""
    common = Counter(values).most_common(1)[0][0]
    return common, [index for index, value in enumerate(values) if value != common]


def slow_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[int]:
    """Nodes that are slow with every partner. Needs three nodes: of two nobody can say which one it is."""
    if count < 3:
        return []
    best = best_of_nodes(bandwidth, count)
    return [node for node in range(count) if best[node] < median(best) / SLOW]


def slow_pairs(bandwidth: Mapping[Pair, float], count: int) -> list[Pair]:
    """Pairs that are slow though both their nodes are fast with others."""
    best = best_of_nodes(bandwidth, count)
    return [pair for pair, found in bandwidth.items() if found < min(best[pair[0]], best[pair[1]]) / SLOW]


def best_of_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[float]:
    """Each node's bandwidth with its fastest partner."""
    return [max((found for pair, found in bandwidth.items() if node in pair), default=0.0) for node in range(count)]


def late_links(seconds: Sequence[float], kinds: Sequence[bool]) -> list[int]:
    """Links whose latency is far above that of the others of their kind (inside a node, between nodes)."""
    usual = {kind: median(s for s, other in zip(seconds, kinds, strict=True) if other == kind) for kind in set(kinds)}
    return [link for link, kind in enumerate(kinds) if seconds[link] > LATE * usual[kind]]
