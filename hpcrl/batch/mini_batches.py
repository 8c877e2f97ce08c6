"""Which prompts of a step form a mini-batch (one optimizer step)."""

from __future__ import annotations

import numpy as np

STREAM = 0x6D62  # keeps these numbers apart from others keyed by the same seed


def mini_batch_of(
    num_prompts: int, mini_batch_size: int, *, seed: int, step: int, ppo_epoch: int, shuffle: bool
) -> np.ndarray:
    """Number of the mini-batch of each prompt, int32 (num_prompts,); the last one may be smaller.

    A function of (seed, step, ppo_epoch) alone: it knows nothing of ranks. Prompts are put in the order of 64-bit
    numbers from Philox (raw words, which numpy keeps the same from version to version, unlike `permutation`).
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
