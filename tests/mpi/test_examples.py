"""The examples of docs/examples run, learn what they say, and resume to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*JOBS, *ELSEWHERE}
