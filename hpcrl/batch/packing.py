"""Division of a step's samples: over replicas, balanced by work; in mini-batches; in packed micro-batches."""

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

    Counts may be uneven, and replicas may get no samples.

    Args:
        weights: int64 (N,), work of each sample, such as its tokens.
        groups: (N,) of any type; samples of one group go to one replica.
        mini_batches: int (N,); each mini-batch is balanced separately, and its heavier shares go to the replicas with
            the least work from earlier ones.
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


STREAM = 0x6D62  # separates these random numbers from others of the same seed


def mini_batch_of(
    num_prompts: int, mini_batch_size: int, *, seed: int, step: int, ppo_epoch: int, shuffle: bool
) -> np.ndarray:
    """Number of the mini-batch of each prompt, int32 (num_prompts,); the last one may be smaller.

    Depends on (seed, step, ppo_epoch) only, not on ranks. Prompts are sorted by 64-bit random numbers: raw words of
    Philox, which are the same in all versions of numpy, unlike `permutation`.
    """
    if mini_batch_size < 1:
        raise ValueError(f"ppo_mini_batch_size is {mini_batch_size}; expected at least 1 prompt")
    order = np.arange(num_prompts)
    if shuffle:
        key = np.random.SeedSequence(seed % 2**64, spawn_key=(STREAM, step, ppo_epoch))
        order = np.argsort(np.random.Philox(key).random_raw(num_prompts), kind="stable")
    mini_batch = np.empty(num_prompts, dtype=np.int32)
    mini_batch[order] = np.arange(num_prompts) // mini_batch_size
    return mini_batch


def micro_batches(lengths: np.ndarray, max_tokens: int, count: int | None = None) -> list[np.ndarray]:
    """Divide sequences over as few micro-batches as the token budget allows, balanced by tokens.

    Returns int64 arrays of row numbers, ascending inside each; the smallest micro-batches are at both ends of the list,
    where a pipeline fills and drains. With a count above N some are empty. Takes O(N log^2 N) steps. Raises ValueError
    if a sequence is longer than max_tokens, or count is too small.

    Args:
        lengths: integers (N,), tokens of each sequence.
        max_tokens: tokens of one micro-batch at most.
        count: how many micro-batches to make (the most any replica needs); at least as many as this replica needs.
    """
    size = np.asarray(lengths, dtype=np.int64)
    if size.size and size.max() > max_tokens:
        raise ValueError(
            f"sequence {int(size.argmax())} has {int(size.max())} tokens; expected at most "
            f"{max_tokens} per micro-batch; raise ppo_max_token_len_per_gpu to {int(size.max())} or more"
        )
    order = np.argsort(-size, kind="stable").tolist()
    tokens = size.tolist()
    bins = _fewest_bins(order, tokens, max_tokens)
    if count is not None:
        if count < len(bins):
            raise ValueError(
                f"{count} micro-batches asked for, but {int(size.sum())} tokens in {size.size} sequences need "
                f"{len(bins)} of {max_tokens} tokens; ask for {len(bins)} or more"
            )
        bins = _longest_first(order, tokens, count, max_tokens) or bins + [[] for _ in range(count - len(bins))]
    bins.sort(key=lambda rows: (-sum(tokens[row] for row in rows), min(rows, default=-1)))
    return [np.array(sorted(rows), dtype=np.int64) for rows in bins[::2][::-1] + bins[1::2]]


def _fewest_bins(order: list[int], tokens: list[int], max_tokens: int) -> list[list[int]]:
    """The least number of bins found by halving between a lower bound and best fit, balanced if it can be."""
    best = _best_fit(order, tokens, max_tokens)
    low = max(-(-sum(tokens) // max_tokens), sum(2 * length > max_tokens for length in tokens), min(1, len(tokens)))
    high = len(best)
    while low < high:
        middle = (low + high) // 2
        bins = _longest_first(order, tokens, middle, max_tokens)
        if bins is None:
            low = middle + 1
        else:
            best, high = bins, middle
    return _longest_first(order, tokens, high, max_tokens) or best


def _longest_first(order: list[int], tokens: list[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Each sequence, longest first, into the emptiest of `count` bins (Graham 1969); None if one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for row in order:
        load, i = loads[0]
        if load + tokens[row] > max_tokens:
            return None
        bins[i].append(row)
        heapq.heapreplace(loads, (load + tokens[row], i))
    return bins


def _best_fit(order: list[int], tokens: list[int], max_tokens: int) -> list[list[int]]:
    """Each sequence, longest first, into the fullest bin with room for it (best-fit decreasing)."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row in order:
        at = bisect.bisect_left(room, (tokens[row], 0))
        if at == len(room):
            remaining, i = max_tokens, len(bins)
            bins.append([])
        else:
            remaining, i = room.pop(at)
        bins[i].append(row)
        bisect.insort(room, (remaining - tokens[row], i))
    return bins
