"""Assignment of samples to replicas, balanced by work."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Subset: TypeAlias = tuple[float, int, list[int]]  # (sum, smallest item: breaks ties, items)


def karmarkar_karp(weights: Sequence[float] | np.ndarray, k: int) -> list[list[int]]:
    """Split items into k subsets of nearly equal sums by the largest differencing method (Karmarkar and Karp 1982).

    Every item starts as a partition of its own. The two partitions of the widest spread are merged, largest subset
    with smallest, until one is left. Returns k lists of item numbers, ascending inside; the lists are in the order
    of their smallest item, empty ones (fewer items than k) last. Deterministic; about N (log N + log k) steps.
    """
    if k < 1:
        raise ValueError(f"partition into {k} subsets; expected at least 1")
    items = np.asarray(weights).tolist()
    # A partition is its non-empty subsets, ascending; its spread is then largest minus smallest (0 if one is empty).
    heap: list[tuple[float, int, list[Subset]]] = [
        (_minus_spread([(weight, i, [i])], k), i, [(weight, i, [i])]) for i, weight in enumerate(items)
    ]
    heapq.heapify(heap)
    for turn in range(len(items), 2 * len(items) - 1):
        *_, a = heapq.heappop(heap)
        *_, b = heapq.heappop(heap)
        merged = _merge(a, b, k)
        heapq.heappush(heap, (_minus_spread(merged, k), turn, merged))
    subsets = sorted(sorted(subset) for *_, partition in heap for _, _, subset in partition)
    return subsets + [[] for _ in range(k - len(subsets))]


def balanced_assignment(
    weights: np.ndarray, k: int, *, groups: np.ndarray | None = None, mini_batches: np.ndarray | None = None
) -> np.ndarray:
    """Replica of each sample, int32 (N,), such that the sums of weights are nearly equal over k replicas.

    weights: int64 (N,), work of each sample, such as its tokens. groups: (N,) of any type; samples of one group go to
    one replica. mini_batches: int (N,); each mini-batch is balanced separately, and its heavier shares go to the
    replicas with the least work from earlier ones. Counts may be uneven, and replicas may get no samples.
    """
    weights = np.asarray(weights)
    size = len(weights)
    unit = np.arange(size) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    batch = np.zeros(size, dtype=np.int64) if mini_batches is None else np.asarray(mini_batches)
    if len(unit) != size or len(batch) != size:
        raise ValueError(f"{size} weights, {len(unit)} groups, {len(batch)} mini-batches; expected equally many")
    num_units = int(unit.max()) + 1 if size else 0
    batch_of_unit = np.zeros(num_units, dtype=batch.dtype)
    batch_of_unit[unit] = batch
    if (batch_of_unit[unit] != batch).any():
        sample = int((batch_of_unit[unit] != batch).argmax())
        raise ValueError(f"the group of sample {sample} lies in two mini-batches; expected whole groups in each")
    work = np.zeros(num_units, dtype=weights.dtype)
    np.add.at(work, unit, weights)

    replica_of_unit = np.zeros(num_units, dtype=np.int32)
    total = [0] * k
    for number in np.unique(batch_of_unit):
        members = np.flatnonzero(batch_of_unit == number)
        shares = [members[share] for share in karmarkar_karp(work[members], k)]
        shares.sort(key=lambda share: -work[share].sum())  # stable
        for share, replica in zip(shares, sorted(range(k), key=lambda replica: total[replica]), strict=True):
            replica_of_unit[share] = replica
            total[replica] += work[share].sum()
    return replica_of_unit[unit]


def _minus_spread(partition: list[Subset], k: int) -> float:
    return (partition[0][0] if len(partition) == k else 0) - partition[-1][0]


def _merge(a: list[Subset], b: list[Subset], k: int) -> list[Subset]:
    """Pair the i-th largest subset of one with the i-th smallest of the other, empty ones included; modifies both."""
    if len(a) < len(b):
        a, b = b, a
    paired = max(0, len(a) + len(b) - k)
    pairs = zip(a[:paired], reversed(b[:paired]), strict=True)
    new = [_joined(x, y) for x, y in pairs] + b[paired:]
    del a[:paired]
    for subset in new:
        bisect.insort(a, subset)
    return a


def _joined(x: Subset, y: Subset) -> Subset:
    larger, smaller = (x[2], y[2]) if len(x[2]) >= len(y[2]) else (y[2], x[2])
    larger.extend(smaller)
    return (x[0] + y[0], min(x[1], y[1]), larger)
