"""Which prompts of a step form a mini-batch (one optimizer step)."""

from __future__ import annotations

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
