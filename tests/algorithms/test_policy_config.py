"""Verl's keys of the actor, as people bring them."""

from __future__ import annotations

import pytest

from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.rollout_correction.correction import RolloutCorrection
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
    actor = Config().actor.model_dump()
    assert of({**actor, "loss_agg_mode": "token-sum", "fsdp_config": {"offload_policy": True}}) == PolicyLossConfig()
    assert of(None) == of({}) == of({"policy_loss": {"rollout_correction": None}}) == PolicyLossConfig()


def test_clip_ratio_and_nulls_are_verls():
    assert of({"clip_ratio": 0.1}).clip_ratio_low == 0.2
    assert of({"clip_ratio": 0.1, "clip_ratio_low": None}) == PolicyLossConfig(clip_ratio_low=0.1)
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
