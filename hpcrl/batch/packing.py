"""Samples of a step in mini-batches, and a replica's sequences packed into micro-batches."""

from __future__ import annotations

import bisect
import heapq

import numpy as np

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

    lengths: integers (N,), tokens of each sequence. max_tokens: tokens of one micro-batch at most.
    count: how many micro-batches to make (the most any replica needs); at least as many as this replica needs.
    Returns int64 arrays of row numbers, ascending inside each; the smallest micro-batches are at both ends of the
    list, where a pipeline fills and drains. With a count above N some are empty. Takes O(N log^2 N) steps.
    Raises ValueError if a sequence is longer than max_tokens, or count is too small.
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
        found = _longest_first(order, tokens, middle, max_tokens)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
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
            left, i = max_tokens, len(bins)
            bins.append([])
        else:
            left, i = room.pop(at)
        bins[i].append(row)
        bisect.insort(room, (left - tokens[row], i))
    return bins
