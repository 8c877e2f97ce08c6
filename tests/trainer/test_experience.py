"""Which prompts dynamic sampling keeps."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.launch.exits import InputError
from hpcrl.trainer.prompt_groups import differing, metric_values, numbered


def batch(prompts: list[int], scores: list[float], **extras: list[float]) -> DataProto:
    rows = [dict(zip(extras, values, strict=True)) for values in zip(*extras.values(), strict=True)]
    column = np.empty(len(prompts), object)
    column[:] = rows or [{} for _ in prompts]
    samples = {
        "prompt": np.array(prompts),
        "score": np.array(scores, np.float32),
        "acc": np.full(len(prompts), np.nan, np.float32),
        "extras": column,
    }
    return DataProto({}, samples)


def test_only_prompts_whose_samples_differ_are_kept_and_those_with_one_sample() -> None:
    found = differing(batch([7, 7, 3, 3, 9, 5, 5], [0.1, 0.1, 0.0, 1.0, 0.5, 1.0, 1.0]), "reward")
    assert found.tolist() == [False, False, True, True, True, False, False]


def test_equal_scores_whose_deviation_is_not_quite_zero_are_equal() -> None:
    scores = np.full(3, 0.1)
    assert np.std(scores) > 0  # what rounding makes of it
    assert not differing(batch([1, 1, 1], scores.tolist()), "reward").any()


def test_the_metric_may_be_any_number_that_the_scorer_returns() -> None:
    rows = batch([1, 1, 2, 2], [0.5, 0.5, 0.5, 0.5], steps=[1.0, 2.0, 3.0, 3.0])
    assert differing(rows, "steps").tolist() == [True, True, False, False]
    with pytest.raises(InputError, match=r"filter_groups.metric names 'acc', and no sample .* returns score, steps"):
        metric_values(rows.samples, "acc")


def test_prompts_of_a_step_are_counted_from_0_in_the_order_in_which_they_came() -> None:
    found = numbered(batch([4, 4, 9, 9, 11], [0.0] * 5), step=3)
    assert found.samples["prompt"].tolist() == [0, 0, 1, 1, 2]
    assert found.samples["position"].tolist() == [0, 1, 2, 3, 4]
    assert found.meta_info == {"split": "train", "step": 3, "num_prompts": 3}


def test_a_sample_whose_scoring_failed_makes_no_difference() -> None:
    rows = batch([1, 1, 2, 2], [0.0, 0.5, 0.5, 0.5], steps=[1.0, 2.0, 3.0, 3.0])
    rows.samples["extras"][3] = {}
    assert differing(rows, "steps").tolist() == [True, True, False, False]
