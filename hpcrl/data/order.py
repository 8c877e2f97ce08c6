"""Stateless data order: which row stands at a position is a function of (rows, seed, position) and of nothing else.

Positions count the prompts drawn since the start of the run, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import gcd, lcm

import numpy as np

WEIGHT_UNITS = 10_000  # draws after which files of any weights stand in their proportion, at most


@lru_cache(maxsize=16)
def epoch_permutation(num_rows: int, seed: int, epoch: int, shuffle: bool, file: int | None = None) -> np.ndarray:
    """Order of the rows in one epoch: int64 (num_rows,), read-only; the identity when not `shuffle`.

    `file` gives files whose epochs are counted apart orders of their own.
    """
    if shuffle:
        # Raw Philox words, sorted: numpy promises those bits for ever, but not those of `Generator.permutation`.
        name = f"data order {seed} {epoch}" + ("" if file is None else f" file {file}")
        key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable").astype(np.int64)
    else:
        order = np.arange(num_rows, dtype=np.int64)
    order.flags.writeable = False
    return order


def rows_at(
    positions: np.ndarray, num_rows: int, seed: int, shuffle: bool, file: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows at `positions` (int64, rising) of all epochs laid end to end: (rows, epochs), both int64 (positions,)."""
    epochs, places = np.divmod(positions, num_rows)
    rows = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        rows[here] = epoch_permutation(num_rows, seed, epoch, shuffle, file)[places[here]]
    return rows, epochs


def batch_rows(num_rows: int, batch_size: int, step: int, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a step: positions [(step - 1) * batch_size, step * batch_size) of all epochs laid end to end.

    `step` counts from 1. Returns (rows, epochs), both int64 (batch_size,); epochs count from 0, and a batch may cross
    from one epoch into the next.
    """
    if num_rows < 1 or batch_size < 1 or step < 1:
        raise ValueError(f"num_rows={num_rows}, batch_size={batch_size}, step={step}: all must be at least 1")
    positions = np.arange((step - 1) * batch_size, step * batch_size, dtype=np.int64)
    return rows_at(positions, num_rows, seed, shuffle)


def weight_quotas(weights: Sequence[float]) -> list[int]:
    """The weights, all above 0, as whole numbers in their proportion whose sum is 10,000 at most.

    Where there are none that small, the largest-remainder shares of 10,000, and 0 for a weight without a share.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    quotas = [int(weight * scale) for weight in exact]
    if sum(quotas) // gcd(*quotas) > WEIGHT_UNITS:
        shares = [WEIGHT_UNITS * weight / sum(exact) for weight in exact]
        quotas = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i])
        for i in by_remainder[: WEIGHT_UNITS - sum(quotas)]:
            quotas[i] += 1
    common = gcd(*quotas)
    return [quota // common for quota in quotas]


@lru_cache(maxsize=4)
def file_cycle(quotas: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """One cycle of files in which file f stands quotas[f] times, each as evenly spread as its quota allows.

    Webster's method: the j-th draw of a file belongs at (j + 1/2) / quota of the cycle. Returns (files, before), both
    int64 (sum(quotas),): the file at each place, and how often it stood at earlier places.
    """
    files = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    before = np.concatenate([np.arange(quota, dtype=np.int64) for quota in quotas])
    order = np.argsort((before + 0.5) / np.asarray(quotas)[files], kind="stable")
    return files[order], before[order]


def weighted_rows_at(
    positions: np.ndarray, file_sizes: Sequence[int], quotas: Sequence[int], seed: int, shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """As `rows_at`, with files drawn in the proportion of `quotas`; epochs count the passes over a row's own file.

    Rows are numbered over all files laid end to end; `file_sizes` are rows per file.
    """
    in_cycle, before = file_cycle(tuple(quotas))
    cycles, places = np.divmod(positions, len(in_cycle))
    files = in_cycle[places]
    drawn = cycles * np.asarray(quotas, np.int64)[files] + before[places]
    starts = np.cumsum([0, *file_sizes])
    rows, epochs = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    for file in np.unique(files).tolist():
        here = files == file
        rows[here], epochs[here] = rows_at(drawn[here], file_sizes[file], seed, shuffle, file)
        rows[here] += starts[file]
    return rows, epochs


def steps_for_epochs(num_rows: int, batch_size: int, epochs: int) -> int:
    """Steps of `epochs` passes over the rows, without a last batch that they do not fill; at least one."""
    return max(1, num_rows * epochs // batch_size)
