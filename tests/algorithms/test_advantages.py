"""Advantage estimators by name: what they ask for, what they are configured by, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.algorithms import advantage
from hpcrl.algorithms.advantages import ESTIMATORS, register_adv_est
from hpcrl.config.schema import AlgorithmConfig, Config
from tests.algorithms.verl_cases.advantages import ESTIMATORS as NEEDS

TWO = {"token_level_rewards": torch.tensor([[1.0], [3.0]]), "response_mask": torch.ones(2, 1)}


def test_estimators_say_what_they_need():
    assert {name: ESTIMATORS.get(name).inputs for name in ESTIMATORS.names()} == NEEDS | {
        "gigpo": ("index", "turn_states")
    }
    optional = {name: ESTIMATORS.get(name).optional for name in ESTIMATORS.names()}
    assert {name: names for name, names in optional.items() if names} == {
        "optimal_token_baseline": ("rollout_is_weights",),
        "tir_optimal_token_baseline": ("rollout_is_weights",),
    }


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown adv_estimator 'grppo'; did you mean 'grpo'") as caught:
        ESTIMATORS.get("grppo")
    assert caught.value.user_error is True and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("gae", {}, "adv_estimator=gae needs values; got nothing else"),
        ("gae", {"values": None}, "adv_estimator=gae needs values; got nothing else"),
        ("rloo", {"uid": [0, 0]}, "adv_estimator=rloo needs index; got uid"),
        ("gdpo", {"index": [0, 0]}, "adv_estimator=gdpo needs reward_components; got index"),
        ("remax", {"index": [0, 0]}, "adv_estimator=remax needs reward_baselines; got index"),
        ("grpo", {"index": [0, 0], "values": torch.ones(2, 1)}, "grpo does not take values; it takes index"),
        ("grpo", {"index": [0, 0], "gamma": 1.0}, "grpo does not take gamma; it takes index"),
        (
            "reinforce_plus_plus",
            {"lam": 1.0},
            "does not take lam; it takes only token_level_rewards",
        ),
    ],
)
def test_a_missing_or_useless_argument_is_an_error(name, tensors, message):
    with pytest.raises(TypeError, match=message) as caught:
        advantage(name, **TWO, **tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"index": [0, 0, 0]}, "index has the groups of 3 samples; there are 2"),
        ({"index": [0, 0], "response_mask": torch.ones(2, 2)}, r"rewards \(2, 1\) and response_mask \(2, 2\)"),
        ({"index": torch.tensor([[0], [0]])}, r"index is \(2, 1\); expected one id per sample, \(2,\)"),
        ({"index": np.array([["a"], ["a"]])}, r"index is \(2, 1\); expected one id per sample, \(2,\)"),
        ({"index": [0, 0], "token_level_rewards": [[1.0], [3.0]]}, "token_level_rewards is a list; expected a tensor"),
    ],
)
def test_shapes_are_checked(tensors, message):
    with pytest.raises((TypeError, ValueError), match=message):
        advantage("grpo", **{**TWO, **tensors})


def test_numbers_may_be_integers_arrays_and_lists():
    integers = {"token_level_rewards": torch.tensor([[0, 1], [0, 2]]), "response_mask": torch.ones(2, 2)}
    floats = {**integers, "token_level_rewards": integers["token_level_rewards"].float()}
    for name in ("grpo", "reinforce_plus_plus", "gpg"):
        tensors = {"index": [0, 0]} if name != "reinforce_plus_plus" else {"gamma": 0.9}
        both = advantage(name, **integers, **tensors), advantage(name, **floats, **tensors)
        for found, expected in zip(*both, strict=True):
            assert torch.equal(found, expected) and found.is_floating_point()
    for baselines in (torch.tensor([0.5, 1.0]), np.array([0.5, 1.0]), [0.5, 1.0]):
        assert advantage("remax", **floats, reward_baselines=baselines)[0].tolist() == [[0.5, 0.5], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("of_rewards", "of_values"), [("float32", "float64"), ("float64", "float32"), ("int64", "float16")]
)
def test_gae_promotes_as_torch_does(of_rewards, of_values):
    rewards, values = torch.tensor([[0, 1, 1]]), torch.tensor([[0.25, 0.5, 0.75]])
    mask = torch.ones(1, 3)
    given = {"token_level_rewards": rewards.to(getattr(torch, of_rewards)), "response_mask": mask, "gamma": 0.9}
    found = advantage("gae", **given, values=values.to(getattr(torch, of_values)))
    dtype = torch.float64 if "float64" in (of_rewards, of_values) else torch.float32
    expected = advantage(
        "gae", token_level_rewards=rewards.double(), response_mask=mask, gamma=0.9, values=values.double()
    )
    for x, exact in zip(found, expected, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), exact, rtol=1e-10 if dtype == torch.float64 else 1e-5, atol=1e-10)


def test_one_baseline_per_sample():
    with pytest.raises(ValueError, match=r"reward_baselines is \(3,\) beside token_level_rewards \(2, 1\)"):
        advantage("remax", **TWO, reward_baselines=torch.ones(3))


@pytest.mark.parametrize(
    "index",
    [
        [7, 3, 7],
        ("b", "a", "b"),
        np.array(["b", "a", "b"]),
        np.array(["b", 1, "b"], dtype=object),
        np.array([7, 3, 7], dtype=np.int32),
        torch.tensor([7, 3, 7]),
        [torch.tensor(7), torch.tensor(3), torch.tensor(7)],
    ],
)
def test_group_ids_may_be_anything(index):
    rewards = torch.tensor([[1.0], [2.0], [5.0]])
    found, _ = advantage("rloo", token_level_rewards=rewards, response_mask=torch.ones(3, 1), index=index)
    assert found.tolist() == [[-4.0], [2.0], [4.0]]


@pytest.mark.parametrize(
    "config",
    [
        {"norm_adv_by_std_in_grpo": False},
        {"algorithm": {"norm_adv_by_std_in_grpo": False, "kl_ctrl": {"type": "fixed"}, "gamma": 0.5}},
        {"algorithm.norm_adv_by_std_in_grpo": False, "kl_ctrl.kl_coef": 0.1, "filter_groups": None, "lam": None},
        {"_target_": "AlgoConfig", "kl_ctrl": {"_target_": "KlConfig"}, "norm_adv_by_std_in_grpo": False},
        {"algorithm": {"norm_adv_by_std_in_grpo": False}, "actor_rollout_ref": {"actor": {"clip_ratio": 0.2}}},
        AlgorithmConfig(norm_adv_by_std_in_grpo=False),
        Config(algorithm={"norm_adv_by_std_in_grpo": False}),
    ],
)
def test_config_is_nested_or_dotted_and_may_hold_the_whole_section(config):
    found, _ = advantage("grpo", config, **TWO, index=[0, 0])
    assert found.tolist() == [[-1.0], [1.0]]


def test_gamma_as_an_argument_wins():
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    given = {"token_level_rewards": rewards, "response_mask": mask}
    _, returns = advantage("reinforce_plus_plus", {"gamma": 1.0}, **given, gamma=torch.tensor(0.5))
    assert returns.tolist() == [[0.5, 1.0]]


def test_an_unknown_key_gets_the_nearest():
    with pytest.raises(
        ValueError, match="unknown key 'norm_adv_by_std' in algorithm; did you mean 'norm_adv_by_std_in"
    ):
        advantage("grpo", {"norm_adv_by_std": False}, **TWO, index=[0, 0])


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("reinforce_plus_plus", {"gamma": "0.5"}, "gamma is '0.5'; expected a number"),
        ("grpo", {"norm_adv_by_std_in_grpo": "false"}, "norm_adv_by_std_in_grpo is 'false'; expected true or false"),
        ("gdpo", {"gdpo_reward_keys": "acc"}, "gdpo_reward_keys is 'acc'; expected a list"),
        (
            "grpo",
            "norm_adv_by_std_in_grpo=false",
            "the config is a str; expected a mapping of verl's keys",
        ),
    ],
)
def test_wrong_values_get_one_line(name, config, message):
    with pytest.raises(TypeError, match=message):
        advantage(name, config, **TWO)


def test_every_key_of_the_algorithm_section_is_known():
    found, _ = advantage("grpo", AlgorithmConfig().model_dump(), **TWO, index=[0, 0])
    assert found[1, 0] > 0.7


def test_gdpo_components():
    given = {**TWO, "index": [0, 0], "reward_components": {"acc": torch.tensor([0.0, 1.0])}}
    named = advantage("gdpo", {"gdpo_reward_keys": ["acc"]}, **given)
    assert torch.equal(named[0], advantage("gdpo", **given)[0])
    with pytest.raises(ValueError, match="gdpo_reward_keys names 'format'; the scorer returned acc"):
        advantage("gdpo", {"gdpo_reward_keys": ["acc", "format"]}, **given)
    with pytest.raises(ValueError, match="gdpo_reward_weights has 2 numbers for 1 reward components"):
        advantage("gdpo", {"gdpo_reward_weights": [1.0, 2.0]}, **given)
    with pytest.raises(ValueError, match=r"component of shape \(3,\); expected one number for each of 2 samples"):
        advantage("gdpo", **{**given, "reward_components": {"acc": torch.ones(3)}})


def test_no_gradient_and_no_change_of_what_is_given():
    values = torch.ones(2, 1, requires_grad=True)
    rewards = TWO["token_level_rewards"].clone()
    for result in advantage("gae", token_level_rewards=rewards, response_mask=torch.ones(2, 1), values=values):
        assert not result.requires_grad
        result.zero_()
    assert torch.equal(rewards, TWO["token_level_rewards"]) and values.tolist() == [[1.0], [1.0]]


def test_ones_own_estimator():
    @register_adv_est("own")
    def own(token_level_rewards, response_mask, *, index, gamma, bonus=None):
        return token_level_rewards * gamma + (0.0 if bonus is None else bonus), token_level_rewards

    try:
        estimator = ESTIMATORS.get("own")
        assert (estimator.inputs, estimator.optional, estimator.settings) == (("index",), ("bonus",), ("gamma",))
        assert estimator(**TWO, index=[0, 0], params=estimator.params(gamma=0.5))[0].tolist() == [[0.5], [1.5]]
        assert advantage("own", **TWO, index=[0, 0], bonus=torch.ones(2, 1))[0].tolist() == [[2.0], [4.0]]
        with pytest.raises(ValueError, match="registered already"):
            register_adv_est("own")(own)
        with pytest.raises(TypeError, match=r"'loose' takes \*\*rest; name each tensor it needs, after a \*"):
            register_adv_est("loose")(lambda token_level_rewards, response_mask, **rest: None)
    finally:
        ESTIMATORS._entries.pop("own")
