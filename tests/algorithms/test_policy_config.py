"""Verl's keys of the actor, as people bring them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.algorithms import policy_loss
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from hpcrl.algorithms.rollout_correction import RolloutCorrection, preset
from hpcrl.algorithms.surrogate_losses import BypassMode
from hpcrl.config.schema import Config


def of(config: Any, name: str = "bypass_mode") -> Any:
    return POLICY_LOSSES.get(name).parameters(config)


def test_nested_and_dotted_keys_say_the_same():
    expected = BypassMode(clip_ratio_low=0.1, rollout_is="token")
    nested = {"clip_ratio_low": 0.1, "policy_loss": {"clip_cov_lb": 2.0, "rollout_correction": {"rollout_is": "token"}}}
    assert of(nested) == of({"actor": nested}) == expected
    dotted = {"actor.clip_ratio_low": 0.1, "policy_loss.clip_cov_lb": 2.0}
    assert of({**dotted, "policy_loss.rollout_correction.rollout_is": "token"}) == expected
    assert of({**dotted, "policy_loss.rollout_correction": RolloutCorrection(rollout_is="token")}) == expected
    assert of(dotted, "clip_cov") == of(nested, "clip_cov")
    assert of(dotted, "clip_cov").clip_cov_lb == 2.0


def test_a_whole_actor_section_can_be_given():
    actor, expected = Config().actor.model_dump(), BypassMode()
    assert of({**actor, "loss_agg_mode": "token-sum", "fsdp_config": {"_target_": "x", "offload": True}}) == expected
    assert of(Config().actor) == of({"actor": Config().actor}) == expected
    whole = {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 4}}, "algorithm": {"gamma": 1.0}, "trainer.n": 1}
    assert of(whole) == of({"actor_rollout_ref.actor.clip_ratio_c": 3.0}) == expected
    assert of(None) == of({}) == of({"policy_loss": {"rollout_correction": None}}) == expected


def test_clip_ratio_stands_in_for_what_is_not_given_and_nulls_are_verls():
    both = BypassMode(clip_ratio=0.1)
    assert (both.clip_ratio_low, both.clip_ratio_high) == (0.1, 0.1)
    assert of({"clip_ratio": 0.1}) == of({"clip_ratio": 0.1, "clip_ratio_low": None}) == both
    assert of({"clip_ratio": 0.1, "clip_ratio_high": 0.3}) == BypassMode(clip_ratio=0.1, clip_ratio_high=0.3)
    assert of({"clip_ratio_low": None, "clip_ratio_high": None}) == BypassMode()
    assert of({"policy_loss": {"clip_cov_ub": None}}, "clip_cov").clip_cov_ub == 5.0
    assert of({"policy_loss": {"ppo_kl_coef": None}}, "kl_cov").ppo_kl_coef is None


def test_the_bound_of_the_ratio_is_verls_of_each_loss():
    assert (of({}, "vanilla").clip_ratio_c, of({}, "dppo_tv").clip_ratio_c) == (3.0, 20.0)
    assert of({"clip_ratio_c": 4.0}, "dppo_tv").clip_ratio_c == 4.0


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
    expected = preset("bypass_pg_is", rollout_is_threshold=3.0)
    assert (of(named).loss_type, of(named).rollout_is, of(named).rollout_is_threshold) == (
        expected.loss_type,
        expected.rollout_is,
        3.0,
    )
    assert of({"policy_loss.rollout_correction.preset": None}) == BypassMode()


def test_the_scale_factor_of_the_global_batch_wins_unless_it_is_null():
    columns = {name: torch.ones(2, 3) for name in ("old_log_prob", "log_prob", "advantages", "response_mask")}

    def loss(**config: Any) -> float:
        mode = "seq-mean-token-sum-norm"
        return policy_loss("vanilla", **columns, loss_agg_mode=mode, config=config)[0].item()

    assert loss(loss_scale_factor=6) == loss(loss_scale_factor=5, global_batch_info={"loss_scale_factor": 6})
    assert loss(loss_scale_factor=6) == loss(loss_scale_factor=6, global_batch_info={"loss_scale_factor": None})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_ratio": -0.1}, "clip_ratio is -0.1; expected a number of at least 0"),
        ({"clip_ratio_high": -1}, "clip_ratio_high is -1; expected a number of at least 0"),
        ({"clip_ratio_low": "0.2"}, "clip_ratio_low is '0.2'; expected a number"),
        ({"clip_ratio_c": True}, "clip_ratio_c is True; expected a number"),
        ({"global_batch_info.dp_size": 0}, "dp_size is 0; expected a number above 0"),
        ([("clip_ratio", 0.2)], "the config is a list; expected a mapping of verl's keys of actor"),
        ({"actor_rollout_ref.actor": {"clip_ratio_hi": 0.1}}, "unknown key 'actor_rollout_ref.actor.clip_ratio_hi'"),
        ({"algorithm": {"gamma": 1.0}}, "unknown key 'algorithm.gamma' in actor"),
    ],
)
def test_wrong_values_get_one_line(config, message):
    tensor = torch.ones(1, 1)
    columns = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), tensor)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        policy_loss("vanilla", **columns, config=config)
    assert "\n" not in str(caught.value)
