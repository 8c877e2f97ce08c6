"""Verl's keys of the actor, as people bring them."""

from __future__ import annotations

import pytest

from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.rollout_correction.presets import preset
from hpcrl.algorithms.rollout_correction.settings import RolloutCorrection
from hpcrl.config.schema import Config

of = PolicyLossConfig.from_mapping


def test_nested_and_dotted_keys_say_the_same():
    expected = PolicyLossConfig(
        clip_ratio_low=0.1, clip_cov_lb=2.0, rollout_correction=RolloutCorrection(rollout_is="token")
    )
    nested = {"clip_ratio_low": 0.1, "policy_loss": {"clip_cov_lb": 2.0, "rollout_correction": {"rollout_is": "token"}}}
    assert of(nested) == of({"actor": nested}) == expected
    dotted = {"actor.clip_ratio_low": 0.1, "policy_loss.clip_cov_lb": 2.0}
    assert of({**dotted, "policy_loss.rollout_correction.rollout_is": "token"}) == expected
    assert of({**dotted, "policy_loss.rollout_correction": RolloutCorrection(rollout_is="token")}) == expected


def test_a_whole_actor_section_can_be_given():
    actor, expected = Config().actor.model_dump(), PolicyLossConfig(clip_ratio_c=3.0)
    assert of({**actor, "loss_agg_mode": "token-sum", "fsdp_config": {"_target_": "x", "offload": True}}) == expected
    assert of(Config().actor) == of({"actor": Config().actor}) == expected
    whole = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 4}}, "algorithm": {"gamma": 1.0}, "trainer.n": 1}
    assert of(whole) == of({"actor_rollout_ref.actor.clip_ratio_c": 3.0}) == expected
    assert of(None) == of({}) == of({"policy_loss": {"rollout_correction": None}}) == PolicyLossConfig()


def test_clip_ratio_stands_in_for_what_is_not_given_and_nulls_are_verls():
    both = PolicyLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.1)
    assert of({"clip_ratio": 0.1}) == of({"clip_ratio": 0.1, "clip_ratio_low": None}) == both
    assert of({"clip_ratio": 0.1, "clip_ratio_high": 0.3}) == PolicyLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.3)
    assert of({"clip_ratio_low": None, "clip_ratio_high": None}) == PolicyLossConfig()
    assert of({"policy_loss": {"ppo_kl_coef": None, "clip_cov_ub": None}}) == PolicyLossConfig(ppo_kl_coef=1.0)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("clip_ratio_hi", "clip_ratio_high"),
        ("policy_loss.clip_cov_rate", "policy_loss.clip_cov_ratio"),
        ("policy_loss.rollout_correction.rollout_rs_treshold", "policy_loss.rollout_correction.rollout_rs_threshold"),
    ],
)
def test_unknown_keys_are_named(key, nearest):
    with pytest.raises(ValueError, match=f"unknown key '{key}' in actor; did you mean '{nearest}'"):
        of({key: 1})


def test_a_preset_of_rollout_correction_is_what_the_other_keys_change():
    named = {"policy_loss": {"rollout_correction": {"preset": "bypass_pg_is", "rollout_is_threshold": 3.0}}}
    assert of(named).rollout_correction == preset("bypass_pg_is", rollout_is_threshold=3.0)
    assert of({"policy_loss.rollout_correction.preset": None}) == PolicyLossConfig()


def test_the_scale_factor_of_the_global_batch_wins_unless_it_is_null():
    assert of({"global_batch_info.loss_scale_factor": 7, "loss_scale_factor": 5}).loss_scale_factor == 7
    assert of({"global_batch_info": {"loss_scale_factor": None}, "loss_scale_factor": 5}).loss_scale_factor == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_ratio": -0.1}, "clip_ratio_low is -0.1; expected 0 or more"),
        ({"clip_ratio_high": -1}, "clip_ratio_high is -1; expected 0 or more"),
        ({"clip_ratio_low": "0.2"}, "clip_ratio_low is '0.2'; expected a number"),
        ({"policy_loss.clip_cov_lb": True}, "clip_cov_lb is True; expected a number"),
        ({"global_batch_info.dp_size": 0}, "dp_size is 0; expected more than 0"),
        ([("clip_ratio", 0.2)], "the config is a list; expected a mapping of verl's keys of actor"),
        ({"actor_rollout_ref.actor": {"clip_ratio_hi": 0.1}}, "unknown key 'actor_rollout_ref.actor.clip_ratio_hi'"),
        ({"algorithm": {"gamma": 1.0}}, "unknown key 'algorithm.gamma' in actor"),
    ],
)
def test_wrong_values_get_one_line(config, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        of(config)
    assert "\n" not in str(caught.value)
