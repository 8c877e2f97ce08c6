"""The examples of docs/examples run, learn what they say, and resume to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.run.time_budget import TimeBudget
from tests.mpi.lab import ROOT, Lab, metrics

EXAMPLES = ROOT / "docs" / "examples"
NO_KL: dict[str, Any] = {"use_kl_in_reward": False}
ELSEWHERE = {"transformers_engine"}  # in test_engines, and in tests/run/test_engine_jobs.py
POOLS = {"ours": "0", "theirs": "1"}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # placement, sections, metric that only it has
    "grpo_by_hand": ({}, {"algorithm": {**NO_KL, "adv_estimator": "grpo"}, "actor": {"use_kl_loss": False}}, ""),
    "online_dpo_by_hand": ({"ref": {"tp": 2}}, {"algorithm": {**NO_KL, "adv_estimator": "grpo"}}, "actor/dpo_loss"),
    "process_reward_model": (
        {"prm": {"tp": 2}},
        {
            "algorithm": {**NO_KL, "adv_estimator": "reinforce_plus_plus"},
            "actor": {"use_kl_loss": False},
            "prm": {"model": {"num_layers": 1, "hidden_size": 64}},
        },
        "prm/reward/mean",
    ),
    "self_play": (
        {
            "pools": POOLS,
            **{role: {"pool": "ours"} for role in ("actor", "rollout")},
            **{role: {"pool": "theirs"} for role in ("opponent", "opponent_rollout")},
        },
        {"algorithm": {**NO_KL, "adv_estimator": "grpo"}, "actor": {"use_kl_loss": False}},
        "opponent/actor/pg_loss",
    ),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", JOBS)
def test_an_example_resumed_equals_uninterrupted_bitwise(world, lab: Lab, name: str) -> None:
    placement, sections, own_metric = JOBS[name]
    job = str(EXAMPLES / f"{name}.py")
    straight = lab.run(f"{name}_straight", placement, job=job, **sections, trainer={"total_training_steps": 2})
    first = {"total_training_steps": 1, "save_freq": 1}
    lab.run(f"{name}_resumed", placement, job=job, **sections, trainer=first)
    resumed = lab.run(f"{name}_resumed", placement, job=job, **sections, trainer={"total_training_steps": 2})
    if world.rank == 0:
        expected, found = metrics(straight), metrics(resumed)
        assert sorted(found) == [1, 2]
        for step, line in expected.items():
            assert {key: (line[key], found[step].get(key)) for key in line if line[key] != found[step].get(key)} == {}
        assert own_metric in metrics(straight)[2] or not own_metric


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_a_job_of_the_release_before_works(
    world, lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its loop asks nothing within a step, and its members have their former names: a stop in its first step, where it
    is not asked for, saves and ends it, and the numbers are those of the job as it is now."""
    _, sections, _ = JOBS["grpo_by_hand"]
    files = {"val_files": [str(lab.data / "val.parquet")]}
    options = {**sections, "data": files, "trainer": {"total_training_steps": 2, "test_freq": 1}}
    now = lab.run("now", job=str(EXAMPLES / "grpo_by_hand.py"), **options)
    former = str(ROOT / "tests" / "run" / "former_jobs" / "grpo_by_hand.py")
    with monkeypatch.context() as patch:
        stop = lambda self, *phases: "SIGTERM, before reward" if phases == ("reward",) else None  # noqa: E731
        patch.setattr(TimeBudget, "reason_to_stop", stop)
        lab.run("former", job=former, **options)
    run = lab.run("former", job=former, **options)
    if world.rank == 0:
        expected, found = metrics(now), metrics(run)
        assert [found[step].pop("mine/samples") for step in (1, 2)] == [24.0, 24.0]
        assert [found[step].pop("mine/validated") for step in (0, 1, 2) if step in found]
        assert found == expected
        assert "GrpoByHand.validate is now `run` of its validation_class" in caplog.text
        assert "phases_from_update is now what its loop names in run.stops_before" in caplog.text
        assert "stopping: SIGTERM, before reward" in caplog.text


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*JOBS, *ELSEWHERE}
