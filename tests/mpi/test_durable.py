"""A step resumed with the responses of an attempt that did not finish it is the step of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.covering import slow_but
from tests.mpi.lab import Lab, interrupted, metrics, on, own_layout, reused
from tests.mpi.test_async import APART, TP2

# Some samples of a prompt score alike and some do not.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 3 / 3
"""
USER = """
class Interaction:
    def start(self, record):
        return {}

    def respond(self, state, messages):
        text = messages[-1]["content"]
        return len(text) % 3 == 0, "Go on" + text[:1], len(text) / 10
"""


def cases(lab: Lab, world) -> dict[str, dict[str, Any]]:
    if world.rank == 0:
        (lab.folder / "alike.py").write_text(SCORE)
        (lab.folder / "user.py").write_text(USER)
    world.barrier()
    reward = {"custom_reward_function": {"path": str(lab.folder / "alike.py")}}
    plain = {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False}, "reward": reward}
    filtering = {"filter_groups": {"enable": True, "max_num_gen_batches": 20}}
    multi_turn = {"enable": True, "interaction_path": str(lab.folder / "user.py"), "max_assistant_turns": 3}
    return {
        "ppo": {},
        "filter_groups": {**plain, "algorithm": {**plain["algorithm"], **filtering}, "data": {"gen_batch_size": 7}},
        "remax": {**plain, "algorithm": {**plain["algorithm"], "adv_estimator": "remax"}},
        "agent": {
            **plain,
            "model": {"tokenizer": str(Path(__file__).parents[2] / "configs" / "tool_tokenizer"), "vocab_size": None},
            "data": {"max_response_length": 60},
            "rollout": {"multi_turn": multi_turn},
            "actor": {"ppo_max_token_len_per_gpu": 512},
        },
    }


@pytest.mark.world(2)
@pytest.mark.parametrize("case", slow_but("ppo", ["ppo", "filter_groups", "remax", "agent"]))
def test_a_step_of_which_all_was_drawn_is_repeated_bitwise(world, lab: Lab, straight, case: str) -> None:
    """On two ranks of one replica, who have to skip the same requests."""
    sections = cases(lab, world)[case]
    trainer = {"total_training_steps": 2, "save_freq": 1}
    whole = straight(f"durable_{case}", own_layout(2), **sections, trainer=trainer)
    drawn = interrupted(world, lab, whole, f"cut_{case}", saved=1, drawn=2)
    found = lab.run(f"cut_{case}", own_layout(2), **sections, trainer=trainer)
    assert reused(found, 2) == drawn >= 24 + 12 * (case == "remax")
    expected = metrics(whole)[2]
    for name, value in metrics(found)[2].items():
        # Tools and users are not asked again.
        assert value == expected[name] or name.startswith("tools/"), name
    if case == "agent":
        assert expected["training/num_turns/max"] == 3 > expected["training/num_turns/min"]


@pytest.mark.slow
@pytest.mark.world(4)
def test_half_a_step_is_reused_on_another_layout(world, lab: Lab, straight) -> None:
    trainer = {"total_training_steps": 2, "save_freq": 1}
    whole = straight("durable_tp2", own_layout(4), trainer=trainer)
    drawn = interrupted(world, lab, whole, "cut_half", saved=1, drawn=2, keep=0.5)
    found = lab.run("cut_half", on(4), trainer=trainer)
    assert 0 < reused(found, 2) == drawn < 24
    tokens, other = (read_step(step_path(run / "rollouts", 2))[0]["input_ids"] for run in (whole, found))
    assert tokens[0].tolist() == other[0].tolist()


@pytest.mark.slow
@pytest.mark.world(4)
def test_a_step_drawn_ahead_is_reused(world, lab: Lab, straight) -> None:
    """The weights of step 2 draw the responses of step 4; those of step 3 are in the checkpoint."""
    options = {
        "algorithm": {"adv_estimator": "grpo"},
        "async_training": {"mode": "one_step_off"},
        "trainer": {"total_training_steps": 5, "save_freq": 1, "max_ckpt_to_keep": None},
    }
    whole = straight("durable_ahead", APART, **options)
    drawn = interrupted(world, lab, whole, "cut_ahead", saved=2, drawn=4)
    found = lab.run("cut_ahead", APART, **options)
    assert [reused(found, step) for step in (3, 4, 5)] == [0, drawn, 0] and drawn == 24
    for step in (3, 4, 5):
        assert metrics(found)[step] == metrics(whole)[step], step


@pytest.mark.slow
@pytest.mark.world(4)
def test_a_stream_that_starts_anew_reuses_what_the_start_weights_have_drawn(world, lab: Lab, straight) -> None:
    options = {
        "algorithm": {"adv_estimator": "grpo"},
        "async_training": {"mode": "bounded_staleness"},
        "trainer": {"total_training_steps": 3},
    }
    whole = straight("durable_stream", TP2, **options)
    drawn = interrupted(world, lab, whole, "cut_stream", saved=0, drawn=1)
    found = lab.run("cut_stream", TP2, **options)
    assert sum(reused(found, step) for step in (1, 2, 3)) == drawn >= 24
    for step in (1, 2, 3):
        samples = read_step(step_path(found / "rollouts", step))[1]
        assert (step - 1 - samples["weight_version_min"]).max() <= 1
