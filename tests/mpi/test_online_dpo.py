"""`hpcrl online_dpo`: layouts agree on recorded rollouts, a resumed run is the uninterrupted one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_samples
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, metrics, own_layout
from tests.mpi.test_preference import assert_agree

pytestmark = pytest.mark.ci_world(2)

ALONE = {"pools": {"one": "0"}, "actor": {"pool": "one"}, "ref": {"pool": "one"}, "rollout": {"pool": "one"}}
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def run(lab: Lab, name: str, placement: dict[str, Any], optim: dict[str, Any] = SGD, **options: Any) -> dict:
    """Metrics by step, of the run `preference_<name>`: the session's jobs share a folder."""
    trainer = {"save_rollouts": True, **options.pop("trainer", {})}
    actor = {"use_kl_loss": False, "entropy_coeff": 0.0, "optim": optim, **options.pop("actor", {})}
    sections = {"actor": actor, "trainer": trainer, "algorithm": {"use_kl_in_reward": False}, **options}
    lines = metrics(lab.run(f"preference_{name}", placement, job="online_dpo", **sections))
    return {
        step: {key: value for key, value in line.items() if not key.startswith("global_seqlen/")}  # of a layout
        for step, line in lines.items()
    }


@pytest.mark.parametrize("own", [{}, {"loss_type": "ipo", "nll_weight": 0.1}], ids=["sigmoid", "ipo"])
def test_layouts_agree_on_recorded_rollouts(lab: Lab, own: dict[str, Any]) -> None:
    """Two updates in each of two steps. The first loss is that of equal policies."""
    name = own.get("loss_type", "sigmoid")
    recorded = {"rollouts_from": str(lab.folder / f"preference_online_{name}_alone" / "rollouts")}
    expected = run(lab, f"online_{name}_alone", ALONE, online_dpo=own)
    found = run(lab, f"online_{name}_layout", own_layout(lab.world.size), online_dpo=own, trainer=recorded)
    assert_agree(found, expected)
    assert expected[1]["actor/grad_norm"] > 1e-3
    assert expected[1]["training/rollout_log_probs_diff_max"] < 1e-4
    samples = read_samples(step_path(lab.folder / f"preference_online_{name}_alone" / "rollouts", 1))
    scores = np.sort(samples["score"][np.argsort(samples["prompt"], kind="stable")].reshape(-1, 2))
    assert expected[1]["objective/scores_margin"] == pytest.approx(float((scores[:, 1] - scores[:, 0]).mean()))
    assert expected[1]["critic/score/mean"] == pytest.approx(float(scores.mean()))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_resumed_equals_uninterrupted_bitwise(lab: Lab, lora_rank: int) -> None:
    """With one update per step, whose first loss is that of equal policies: adapters are compared with their base."""
    placement = own_layout(lab.world.size)
    if lora_rank:
        placement = {**placement, "ref": placement.get("actor", {})}
    model = {"lora_rank": lora_rank, "target_modules": ["q_proj", "v_proj", "down_proj"]} if lora_rank else {}
    options = {"model": model, "actor": {"ppo_mini_batch_size": 12}, "optim": {"lr": 1e-3}}
    name = f"online_{lora_rank}"
    straight = run(lab, f"{name}_straight", placement, trainer={"total_training_steps": 2}, **options)
    run(lab, f"{name}_halted", placement, trainer={"total_training_steps": 1, "save_freq": 1}, **options)
    found = run(lab, f"{name}_halted", placement, trainer={"total_training_steps": 2, "save_freq": 1}, **options)
    assert found == straight
    assert straight[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert straight[2]["rewards/margins"] != 0


@pytest.mark.world(4)
def test_a_step_off_policy(lab: Lab) -> None:
    """Responses of older weights make pairs as well."""
    asynchronous = {"async_training": {"mode": "one_step_off"}, "trainer": {"total_training_steps": 2}}
    pools = {"a": "1-2", "b": "3"}  # rank 0 runs the loop only
    placement = {"pools": pools, "actor": {"pool": "a"}, "ref": {"pool": "a"}, "rollout": {"pool": "b"}}
    found = run(lab, "online_one_step_off", placement, **asynchronous)
    assert found[2]["actor/grad_norm"] > 0
    assert found[2]["training/off_policy/trajectory_staleness/mean"] == 1
