"""Algorithm keys that cannot go together are refused in one line, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.algorithms.policy_losses import POLICY_LOSSES as REGISTRY
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.jobs.train import Train
from hpcrl.run.job_config import with_presets
from hpcrl.runtime.exits import InputError
from hpcrl.workers.actor_objective import ActorObjective

CASES: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"adv_estimator": "grpo"}}, "rollout.n=1 leaves nothing to compare"),
    ({"algorithm": {"filter_groups": {"enable": True}}}, "would drop every prompt"),
    ({"algorithm": {"adv_estimator": "remax", "use_pf_ppo": True}}, "use adv_estimator=gae"),
    ({"algorithm": {"adv_estimator": "gdpo"}, "rollout": {"n": 2}}, "needs algorithm.gdpo_reward_keys"),
    (
        {
            "algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1.0, 2.0]},
            "rollout": {"n": 2},
        },
        "2 entries for 1 gdpo_reward_keys",
    ),
    ({"actor": {"policy_loss": {"loss_mode": "bypass_mode"}}}, "set algorithm.rollout_correction.bypass_mode=true"),
    (
        {
            "actor": {"policy_loss": {"loss_mode": "gspo"}},
            "algorithm": {"rollout_correction": {"preset": "bypass_pg_is"}},
        },
        "loss_mode=gspo with algorithm.rollout_correction.bypass_mode=true",
    ),
    (
        {
            "algorithm": {
                "adv_estimator": "optimal_token_baseline",
                "rollout_correction": {"preset": "bypass_ppo_clip"},
            },
            "rollout": {"n": 2},
        },
        "needs the forward pass before the update",
    ),
    ({"actor": {"policy_loss": {"loss_mode": "dro"}}}, "actor.policy_loss: policy_loss.dro_beta is null"),
    ({"actor": {"policy_loss": {"loss_mode": "gsop"}}}, "did you mean 'gspo'"),
    ({"algorithm": {"adv_estimator": "grop"}}, "did you mean 'grpo'"),
    ({"algorithm": {"rollout_correction": {"preset": "decoupled_token_tis"}}}, "unknown rollout correction preset"),
    ({"algorithm": {"rollout_correction": {"rollout_rs": "token_k4"}}}, "algorithm.rollout_correction: "),
    ({"reward": {"reward_model": {"enable": True}}}, "reward.reward_model.init_from is null"),
    (
        {"reward": {"reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4}}}},
        "only dapo shapes over-long responses",
    ),
    (
        {
            "reward": {
                "reward_manager": {"name": "dapo"},
                "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 99}},
            },
            "data": {"max_response_length": 64},
        },
        "len=99; expected 1 to the limit of 64",
    ),
    ({"distillation": {"enabled": True}}, "a teacher of random weights teaches nothing"),
    (
        {
            "teacher": {"init_from": "runs/x"},
            "distillation": {
                "enabled": True,
                "distillation_loss": {"loss_mode": "forward_kl_topk", "use_policy_gradient": True},
            },
        },
        "does not estimate from the sampled token",
    ),
    (
        {
            "teacher": {"init_from": "runs/x"},
            "distillation": {"enabled": True, "distillation_loss": {"loss_mode": "k1"}},
        },
        "its gradient ignores the teacher",
    ),
]


def config(sections: dict[str, Any]) -> Config:
    data = {"train_files": ["train.parquet"], "train_batch_size": 256, **sections.get("data", {})}
    return Config.model_validate({**sections, "data": data})


@pytest.mark.parametrize(("sections", "line"), CASES, ids=[line[:40] for _, line in CASES])
def test_what_cannot_work_is_refused_in_one_line(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Train.check_with_torch(with_presets(config(sections)), 2)
    assert getattr(refusal.value, "user_error", False) or isinstance(refusal.value, ConfigError)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_preset_is_written_out_and_the_templates_own_keys_win() -> None:
    correction = {"preset": "decoupled_seq_is_rs", "rollout_is_threshold": 4.0}
    found = with_presets(config({"algorithm": {"rollout_correction": correction}})).algorithm.rollout_correction
    assert (found.rollout_is, found.rollout_is_threshold) == ("sequence", 4.0)
    assert (found.rollout_rs, found.rollout_rs_threshold) == ("seq_sum_k1", "0.5_2.0")
    again = Config.model_validate({"algorithm": {"rollout_correction": found.model_dump()}})
    assert with_presets(again).algorithm.rollout_correction == found  # a resolved template means the same


def test_bypass_mode_brings_its_own_loss_and_saves_the_forward_pass() -> None:
    derived = Train.check_with_torch(
        with_presets(config({"algorithm": {"rollout_correction": {"preset": "bypass_pg_is"}}})), 2
    )
    assert (derived.loss_mode, derived.old_log_prob_in_update) == ("bypass_mode", False)


def test_one_clip_ratio_is_enough_and_a_side_of_its_own_goes_before_it() -> None:
    template = with_presets(config({"actor": {"clip_ratio": 0.1, "clip_ratio_high": 0.3}}))
    found = ActorObjective(template, Train.check_with_torch(template, 2)).policy_params
    assert (found.clip_ratio_low, found.clip_ratio_high) == (0.1, 0.3)


def test_a_plugin_registers_a_loss_that_the_template_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._entries))  # other files of this process test all losses
    file = tmp_path / "my_losses.py"
    file.write_text(
        "from hpcrl.algorithms.aggregation import TokenLosses\n"
        "from hpcrl.algorithms.policy_losses import register_policy_loss\n"
        "@register_policy_loss('mine')\n"
        "def mine(log_prob, old_log_prob, advantages, response_mask, cfg):\n"
        "    return TokenLosses(-advantages * log_prob, {})\n"
    )
    template = config({"run": {"plugins": [str(file)]}, "actor": {"policy_loss": {"loss_mode": "mine"}}})
    for _ in range(2):  # a second job in the same process finds it registered
        assert Train.check_with_torch(with_presets(template), 2).loss_mode == "mine"
    with pytest.raises(InputError, match="no such file"):
        Train.check_with_torch(with_presets(config({"run": {"plugins": [str(tmp_path / "none.py")]}})), 2)


@pytest.mark.parametrize(
    "reads_before",
    [
        {"actor": {"ppo_epochs": 2}},
        {"actor": {"ppo_mini_batch_size": 4}},
        {"actor": {"calculate_sum_pi_squared": True}},
        {"actor": {"separate_old_log_prob": True}},
        {"algorithm": {"use_kl_in_reward": True}},
        {"algorithm": {"adv_estimator": "optimal_token_baseline"}},
        {"algorithm": {"rollout_correction": {"rollout_is": "token"}}},
        {"algorithm": {"rollout_correction": {"preset": "bypass_ppo_clip"}}},
    ],
    ids=str,
)
def test_old_log_probs_come_from_a_steps_only_update_unless_something_reads_them_before(
    reads_before: dict[str, dict[str, Any]],
) -> None:
    grpo = {
        "rollout": {"n": 2},
        "data": {"train_batch_size": 8},
        "actor": {"ppo_mini_batch_size": 8},
        "algorithm": {"adv_estimator": "grpo"},
    }
    assert Train.check_with_torch(with_presets(config(grpo)), 2).old_log_prob_in_update
    sections = {name: {**grpo.get(name, {}), **reads_before.get(name, {})} for name in {*grpo, *reads_before}}
    assert not Train.check_with_torch(with_presets(config(sections)), 2).old_log_prob_in_update
