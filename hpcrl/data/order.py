"""Stateless data order: which rows form step N is a function of (rows, batch size, seed, N) and of nothing else."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np


@lru_cache(maxsize=4)
def epoch_permutation(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Order of the rows in one epoch: int64 (num_rows,), read-only; the identity when not `shuffle`."""
    if shuffle:
        # Raw Philox words, sorted: numpy promises those bits for ever, but not those of `Generator.permutation`.
        key = int.from_bytes(blake2b(f"data order {seed} {epoch}".encode(), digest_size=16).digest(), "little")
        order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable").astype(np.int64)
    else:
        order = np.arange(num_rows, dtype=np.int64)
    order.flags.writeable = False
    return order


def batch_rows(num_rows: int, batch_size: int, step: int, seed: int, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a step: positions [(step - 1) * batch_size, step * batch_size) of all epochs laid end to end.

    `step` counts from 1. Returns (rows, epochs), both int64 (batch_size,); epochs count from 0, and a batch may cross
    from one epoch into the next.
    """
    if num_rows < 1 or batch_size < 1 or step < 1:
        raise ValueError(f"num_rows={num_rows}, batch_size={batch_size}, step={step}: all must be at least 1")
    epochs, places = np.divmod(np.arange((step - 1) * batch_size, step * batch_size, dtype=np.int64), num_rows)
    rows = np.empty(batch_size, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        rows[here] = epoch_permutation(num_rows, seed, epoch, shuffle)[places[here]]
    return rows, epochs


def steps_for_epochs(num_rows: int, batch_size: int, epochs: int) -> int:
    """Steps of `epochs` passes over the rows, without a last batch that they do not fill; at least one."""
    return max(1, num_rows * epochs // batch_size)
