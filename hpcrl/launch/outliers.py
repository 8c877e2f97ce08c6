"""Which of many ranks, nodes and links are not like the others. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

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
