"""Which prompts dynamic sampling keeps, and which ones a resumed run leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config
from hpcrl.data.sampler import OrderedSampler
from hpcrl.observe.record.archive import RolloutLog, finish_step, log_path
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.rollouts.scoring import differing, metric_values, numbered
from hpcrl.run.rollouts.source import RECORDED, RolloutContext, SamplePool
from hpcrl.runtime.exits import InputError


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
        metric_values(rows.samples, "acc", required=True)


def test_a_score_is_the_accuracy_of_a_result_without_one() -> None:
    rows = batch([1, 1, 2, 2, 3, 3], [0.0, 1.0, 1.0, 1.0, 0.0, 1.0], acc=[0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    rows.samples["acc"] = np.array([0, 1, 1, 1, 0, np.nan], np.float32)
    for row in (1, 3, 5):  # the last one failed
        rows.samples["extras"][row] = {}
    assert differing(rows, "acc").tolist() == [True, True, False, False, False, False]


def test_prompts_of_a_step_are_counted_from_0_in_the_order_in_which_they_came() -> None:
    found = numbered(batch([4, 4, 9, 9, 11], [0.0] * 5), step=3)
    assert found.samples["prompt"].tolist() == [0, 0, 1, 1, 2]
    assert found.samples["position"].tolist() == [0, 1, 2, 3, 4]
    assert found.meta_info == {"split": "train", "step": 3, "num_prompts": 3}


def test_a_sample_whose_scoring_failed_makes_no_difference() -> None:
    rows = batch([1, 1, 2, 2], [0.0, 0.5, 0.5, 0.5], steps=[1.0, 2.0, 3.0, 3.0])
    rows.samples["extras"][3] = {}
    assert differing(rows, "steps").tolist() == [True, True, False, False]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded_staleness"])
@pytest.mark.parametrize("before", ["one_step_off", "bounded_staleness"])
def test_a_change_of_mode_says_which_prompts_it_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, mode: str
) -> None:
    state: dict[str, Any] = {"sampler": {"position": 20}, "surplus": False}
    if before == "one_step_off":
        recording = RolloutLog(log_path(tmp_path / "ahead", 4, 0))
        for position in range(6):  # of 3 prompts
            recording.append_sample({}, dict.fromkeys(RECORDED, 0) | {"position": position, "prompt": position // 2})
        recording.close()
        finish_step(tmp_path / "ahead", 4, seed=0, weight_version=3)
        state["ahead"] = {}
    else:
        state["under_way"] = [[1, 0], [2, 0], [5, 0]]
    config = Config.model_validate({"async_training": {"mode": mode}})
    sampler = OrderedSampler(40, 0, False)
    nothing: Any = SimpleNamespace()
    SamplePool(RolloutContext(nothing, config, nothing, sampler, PhaseTimers(), (0,), nothing, 10)).load(
        state, tmp_path, 3
    )
    assert sampler.position == 20
    told = [record.getMessage() for record in caplog.records]
    expected = (
        f"async_training.mode={mode} drops 3 prompts that the checkpoint has drawn and not trained; to keep them, "
        f"resume with async_training.mode={before}"
    )
    assert told == ([expected] if mode != before else [])
