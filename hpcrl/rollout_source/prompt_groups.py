"""The samples of a prompt as a group: which groups teach something, and how they are counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.rewards.manager import numbers_of


def differing(batch: DataProto, metric: str) -> np.ndarray:
    """bool (N,): the rows of prompts whose samples do not all have the same `metric`, and of prompts with one sample.
    Samples without a number of that name make no difference.

    Verl asks whether the standard deviation is 0; rounding can make it 1e-17 for equal values, so this asks whether
    the largest and the smallest differ.
    """
    values = metric_values(batch.samples, metric, required=False)
    _, group, size = np.unique(batch.samples["prompt"], return_inverse=True, return_counts=True)
    largest, smallest = np.full(len(size), -np.inf), np.full(len(size), np.inf)
    known = ~np.isnan(values)
    np.maximum.at(largest, group[known], values[known])
    np.minimum.at(smallest, group[known], values[known])
    return ((largest > smallest) | (size == 1))[group]


def metric_values(samples: Mapping[str, np.ndarray], metric: str, *, required: bool) -> np.ndarray:
    """float64 (N,): the score as `reward`, or what the scorer returned under that key; NaN where there is none.

    InputError where no sample has one and that is `required`.
    """
    key = "score" if metric in ("reward", "seq_reward", "seq_final_reward") else metric
    return numbers_of(samples, key, "algorithm.filter_groups.metric", np.nan, required)


def numbered(batch: DataProto, step: int) -> DataProto:
    """The samples as those of a step, their prompts counted from 0."""
    prompts, prompt = np.unique(batch.samples["prompt"], return_inverse=True)
    places: dict[str, np.ndarray] = {
        "prompt": prompt.astype(np.int32),
        "position": np.arange(len(batch), dtype=np.int64),
    }
    meta = {"split": "train", "step": step, "num_prompts": len(prompts)}
    return DataProto(batch.tokens, batch.samples | places, meta)


def num_prompts(batch: DataProto) -> int:
    return len(np.unique(batch.samples["prompt"]))
