"""When a job ends because its scorer does not do what the job needs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config
from hpcrl.run.rollouts.scoring import DroppedPrompts, FirstSamples
from hpcrl.runtime.exits import InputError

CONFIG = Config.model_validate(
    {
        "data": {"train_batch_size": 3},
        "rollout": {"n": 2},
        "algorithm": {"filter_groups": {"enable": True, "metric": "steps", "max_dropped_prompts": 7}},
    }
)


def scores(size: int, failed: int, **extras: float) -> DataProto:
    """The samples that failed come first."""
    column = np.empty(size, object)
    column[:] = [{} if row < failed else extras for row in range(size)]
    metrics = {"reward/timeouts": Sum(float(failed)), "reward/errors": Sum(0.0)}
    samples = {"extras": column, "acc": np.where(np.arange(size) < failed, np.nan, 0.0).astype(np.float32)}
    return DataProto({}, samples | {"prompt": np.arange(size) // 2}, {"metrics": [metrics]})


def test_all_scores_of_a_step_have_to_fail() -> None:
    first = FirstSamples(CONFIG)
    for _ in range(2):
        first.check_scores(scores(2, 2))
    with pytest.raises(InputError, match=r"all of the first 6 scores failed \(reward/timeouts 6\); logs"):
        first.check_scores(scores(2, 2))


def test_after_one_score_all_others_may_fail() -> None:
    first = FirstSamples(CONFIG)
    for batch in (scores(4, 4), scores(2, 1), scores(20, 20)):
        first.check_scores(batch)


def test_the_metric_has_to_be_there_once() -> None:
    first = FirstSamples(CONFIG)
    first.check_metric(scores(4, 4))
    first.check_metric(scores(2, 1, steps=3.0))
    first.check_metric(scores(20, 20))
    first = FirstSamples(CONFIG)
    first.check_metric(scores(4, 0, length=1.0))
    with pytest.raises(InputError, match=r"filter_groups.metric names 'steps', and no sample .* score, length"):
        first.check_metric(scores(2, 0, length=1.0))


def test_many_prompts_in_a_row_that_are_dropped_end_the_job() -> None:
    """Of two samples each; a prompt with a failed score may be one of a service that is down."""
    dropped, none = DroppedPrompts(CONFIG), np.zeros(8, bool)
    dropped.check(scores(8, 0, steps=3.0), none)
    dropped.check(scores(8, 0, steps=3.0), np.arange(8) < 2)
    for _ in range(3):
        dropped.check(scores(8, 5, steps=2.0), none)  # 3 of 4 prompts failed
        dropped.check(scores(8, 8), none)
    expected = (
        "of the last 7 prompts none has samples that differ in 'steps' (no number in 8 samples, 2 in 6 samples), so "
        "algorithm.filter_groups dropped all of them; use easier or harder prompts, a larger rollout.n or "
        "another metric"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        dropped.check(scores(8, 0, length=2.0), none)
