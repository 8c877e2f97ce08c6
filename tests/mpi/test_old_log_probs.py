"""Steps of one update, whose forward pass gives the old log-probs, against the same steps with a pass of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, metrics, on

pytestmark = pytest.mark.ci_world(2)

GRPO = {"adv_estimator": "grpo", "use_kl_in_reward": False}
PPO = {"use_kl_in_reward": False}
COLUMNS = ("old_log_probs", "rollout_log_probs", "advantages", "entropies")


def passes(run: Path) -> list[bool]:
    """Of each step, whether it had a pass for the old log-probs."""
    return ["timing_s/old_log_prob" in json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_recording_of_more_prompts_than_a_mini_batch_has_a_pass_of_its_own(world: Any, lab: Lab) -> None:
    """The job by itself makes one update a step, of the recording it makes two."""
    actor, trainer = {"ppo_mini_batch_size": 6}, {"total_training_steps": 1}
    recorded = lab.run("old_log_probs_recorded", on(world), algorithm=GRPO, actor=actor, trainer=trainer)
    trainer = {**trainer, "rollouts_from": str(recorded / "rollouts")}
    smaller = {"data": {"train_batch_size": 6}, "actor": actor, "trainer": trainer}
    replayed = lab.run("old_log_probs_replayed", on(world), algorithm=GRPO, **smaller)
    assert passes(replayed) == [True]
    assert metrics(replayed)[1]["actor/loss"] == pytest.approx(metrics(recorded)[1]["actor/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "algorithm", "options", "expected"),
    [
        pytest.param({"pp": 2}, GRPO, {"actor": {"entropy_coeff": 0.0}}, [False, False], id="grpo_pp2"),
        pytest.param({"tp": 2}, PPO, {"trainer": {"critic_warmup": 1}}, [True, False], id="ppo_tp2_warmup"),
    ],
)
def test_metrics_and_archive_are_those_of_a_pass_of_their_own(
    world: Any, lab: Lab, layout: dict[str, int], algorithm: Any, options: dict[str, Any], expected: list[bool]
) -> None:
    runs = []
    for separate in (False, True):
        actor = {"ppo_mini_batch_size": 12, "separate_old_log_prob": separate, **options.get("actor", {})}
        trainer = {"total_training_steps": 2, **options.get("trainer", {})}
        name = f"old_log_probs_{'_'.join(layout)}_{separate}"
        runs.append(lab.run(name, on(world, **layout), algorithm=algorithm, actor=actor, trainer=trainer))
    own, apart = runs
    assert (passes(own), passes(apart)) == (expected, [True, True])
    found, wanted = metrics(own), metrics(apart)
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6, abs=1e-6, nan_ok=True), step
        columns, other_columns = (read_step(step_path(run / "rollouts", step))[0] for run in runs)
        assert columns.keys() == other_columns.keys()
        for column in COLUMNS:
            np.testing.assert_allclose(columns[column][0], other_columns[column][0], rtol=0, atol=1e-6)
        assert np.mean(columns["entropies"][0]) == pytest.approx(found[step]["actor/entropy"], rel=1e-5)
