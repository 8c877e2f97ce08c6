"""Derived values, and the combinations that no job can run."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import derive, roles
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.jobs.rm import RewardModel
from hpcrl.jobs.sft import Sft
from hpcrl.jobs.train import Train
from hpcrl.runtime.launcher import format_spans


def config(**sections: dict[str, Any]) -> Config:
    """A runnable config; each section given here is merged over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {"train_files": ["train.parquet"], "train_batch_size": 64},
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 8},
        "actor": {"ppo_mini_batch_size": 32},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return Train.schema().model_validate(base)


def refusal(ranks: int = 4, /, **sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        derive.check(config(**sections), ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("*", (0, 1, 2, 3, 4, 5, 6)), ("0-3,6", (0, 1, 2, 3, 6)), (" 6 , 1 - 2 ", (1, 2, 6)), ("5", (5,)), ("2-2", (2,))],
)
def test_pool_strings(text: str, ranks: tuple[int, ...]) -> None:
    assert roles.parse_ranks(text, 7) == ranks
    assert roles.parse_ranks(format_spans(ranks), 7) == ranks


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "has ''; expected"),
        ("a-b", "has 'a-b'; expected"),
        ("0,,1", "has ''; expected"),
        ("*,1", "has '*'; expected"),
        ("-1", "has '-1'; expected"),
        ("3-1", "counts down in '3-1'; use 1-3"),
        ("0-2,2", "names rank 2 twice"),
        ("0-999999999999999", "names rank 4, and the job has 4 (0 to 3)"),
        ("9", "names rank 9, and the job has 4 (0 to 3)"),
    ],
)
def test_bad_pool_strings(text: str, line: str) -> None:
    assert line in refusal(placement={"pools": {"all": text}})


def test_derived_values() -> None:
    derived = derive.check(
        config(
            data={"train_batch_size": 50, "max_prompt_length": 100, "max_response_length": 28},
            rollout={"n": 4},
            actor={"ppo_mini_batch_size": 20, "ppo_epochs": 2, "loss_agg_mode": "token-sum", "use_kl_loss": True},
            critic={"ppo_mini_batch_size": 25},
            placement={
                "pools": {"all": "*", "tail": "6-7"},
                "actor": {"tp": 2, "pp": 2},
                "critic": {"pool": "tail", "pp": 2},
            },
        ),
        8,
    )
    assert derived.roles["actor"] == roles.PlacedRole(tuple(range(8)), tp=2, pp=2, pool="all")
    assert derived.roles["critic"] == roles.PlacedRole((6, 7), pp=2, pool="tail")
    assert set(derived.roles) == {"actor", "critic", "ref", "rollout"}
    assert (derived.needs_critic, derived.needs_ref) == (True, True)
    assert derived.max_sequence_length == 128
    assert derived.samples_per_step == 200
    # 50 prompts in mini-batches of 20 are 20, 20 and 10, twice; the critic takes the actor's epochs
    assert (derived.actor_updates_per_step, derived.actor_mini_batch_samples) == (6, 80)
    assert (derived.critic_updates_per_step, derived.critic_mini_batch_size, derived.critic_ppo_epochs) == (4, 25, 2)
    assert derived.critic_loss_agg_mode == "token-sum"
    assert (derived.loss_scale_factor, derived.critic_loss_scale_factor) == (28.0, 28.0)
    assert ("reference micro-batch", 16384, "tokens") in derived.rows
    table = derive.describe(derived)
    assert "critic (tail)" in table and "ranks 6-7" in table and "200 samples" in table


def test_the_critics_loss_scale_factor_is_the_actors_unless_given() -> None:
    for critic, expected in ({}, 9.0), ({"loss_scale_factor": 5}, 5.0):
        derived = derive.check(config(actor={"loss_scale_factor": 9}, critic=critic), 4)
        assert (derived.loss_scale_factor, derived.critic_loss_scale_factor) == (9.0, expected)


def test_roles_that_the_algorithm_does_not_need_are_not_placed() -> None:
    derived = derive.check(
        config(algorithm={"adv_estimator": "grpo"}, rollout={"n": 2}, placement={"critic": {"pool": "none", "tp": 3}}),
        4,
    )
    assert set(derived.roles) == {"actor", "rollout"}
    assert derived.critic_updates_per_step == 0


def test_ranks_of_no_role_are_shown() -> None:
    placement = {"pools": {"all": "1-2"}}
    assert "in no role: ranks 0,3" in derive.describe(derive.check(config(placement=placement), 4))


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        ({"actor": {"tp": 3}}, "placement.actor.tp=3 does not divide num_attention_heads=8; use 1, 2, 4 or 8"),
        ({"critic": {"pp": 5}}, "placement.critic.pp=5 exceeds num_layers=4; use 4 or less"),
        ({"actor": {"tp": 8}}, "tp*pp*cp=8*1*1=8 does not divide the 4 ranks of pool all; the product must be 1, 2"),
        ({"actor": {"pp": 3}}, "tp*pp*cp=1*3*1=3 does not divide the 4 ranks"),
        ({"rollout": {"pp": 2}}, "placement.rollout.pp=2 is not supported: a rollout engine splits all weights by tp"),
        ({"rollout": {"cp": 2}}, "placement.rollout.cp=2 is not supported: a rollout engine splits all weights by tp"),
        ({"actor": {"ep": 2}}, "placement.actor.ep=2 divides experts, and model: has none; use 1"),
        ({"actor": {"pool": "al"}}, "placement.actor.pool=al is not in placement.pools; did you mean all?"),
        ({"actor": {"pool": "xyz"}}, "placement.actor.pool=xyz is not in placement.pools; known pools: all"),
    ],
)  # fmt: skip
def test_layouts(placement: dict[str, Any], line: str) -> None:
    assert line in refusal(placement=placement)


def test_tp_must_divide_query_groups_and_feed_forward_width() -> None:
    tp4 = {"actor": {"tp": 4}}
    assert refusal(model={"num_query_groups": 2}, placement=tp4) == (
        "placement.actor.tp=4 does not divide num_query_groups=2; use 1 or 2"
    )
    assert refusal(model={"ffn_hidden_size": 30}, placement=tp4) == (
        "placement.actor.tp=4 does not divide ffn_hidden_size=30; use 1 or 2"
    )


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"model": {"num_query_groups": 3}}, "num_query_groups=3 does not divide num_attention_heads=8; use 1, 2, 4"),
        ({"model": {"hidden_size": 60}}, "num_attention_heads=8 does not divide hidden_size=60"),
        ({"model": {"head_dim": 7}}, "model.head_dim=7 is odd"),
        ({"model": {"hidden_size": 56}}, "model.head_dim=7 is odd"),
        ({"model": {"max_position_embeddings": 1000}}, "= 512 + 512 exceeds model.max_position_embeddings=1000"),
        ({"data": {"train_files": []}}, "data.train_files is empty"),
        ({"actor": {"ppo_mini_batch_size": 65}}, "actor.ppo_mini_batch_size=65 exceeds data.train_batch_size=64"),
        ({"critic": {"ppo_mini_batch_size": 65}}, "critic.ppo_mini_batch_size=65 exceeds data.train_batch_size=64"),
        ({"actor": {"ppo_max_token_len_per_gpu": 1023}}, "actor.ppo_max_token_len_per_gpu=1023 is less than the"),
        ({"critic": {"ppo_max_token_len_per_gpu": 9}}, "critic.ppo_max_token_len_per_gpu=9 is less than the longest"),
        (
            {"ref": {"log_prob_max_token_len_per_gpu": 9}, "actor": {"use_kl_loss": True}},
            "ref.log_prob_max_token_len_per_gpu=9 is less than the longest",
        ),
        ({"rollout": {"max_num_batched_tokens": 511}}, "rollout.max_num_batched_tokens=511 is less than"),
        ({"rollout": {"val_kwargs": {"n": 4}}}, "n=4 without sampling draws the same sample 4 times"),
        ({"trainer": {"test_freq": 5}}, "trainer.test_freq=5 validates, and data.val_files is empty"),
        ({"algorithm": {"adv_estimator": "remax"}, "trainer": {"critic_warmup": 5}}, "trainer.critic_warmup=5 trains"),
        ({"actor": {"optim": {"lr": 1.0, "min_lr": 2.0}}}, "actor.optim.min_lr=2.0 exceeds lr=1.0; use 1.0 or less"),
    ],
)  # fmt: skip
def test_combinations(sections: dict[str, dict[str, Any]], line: str) -> None:
    assert line in refusal(**sections)


def test_group_estimators_need_several_samples() -> None:
    line = refusal(algorithm={"adv_estimator": "grpo"})
    assert line.startswith("algorithm.adv_estimator=grpo compares the samples of a prompt, and rollout.n=1")


def test_sft() -> None:
    # PPO's batch sizes mean nothing to SFT
    derived = Sft.check(config(actor={"ppo_mini_batch_size": 9999}, placement={"actor": {"tp": 2}}), 4)
    assert set(derived.roles) == {"actor"}
    assert ("step", 256, "samples") in derived.rows
    assert "256 samples" in derive.describe(derived)
    with_eval = config(sft={"eval_freq": 5}, data={"train_files": ["a"], "val_files": ["b"]})
    assert set(Sft.check(with_eval, 4).roles) == {"actor", "rollout"}


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"data": {"train_files": []}}, "data.train_files is empty"),
        ({"sft": {"stop_at_score": 0.2}}, "sft.stop_at_score=0.2 needs evaluations"),
        ({"sft": {"eval_freq": 5}}, "sft.eval_freq=5 evaluates, and data.val_files is empty"),
        (
            {
                "sft": {"eval_freq": 5},
                "data": {"val_files": ["b"]},
                "rollout": {"engine": "tensorrt_llm"},
            },
            "rollout.engine=tensorrt_llm is not for the evaluations",
        ),
        ({"sft": {"max_token_len_per_gpu": 5}}, "sft.max_token_len_per_gpu=5 is less than the longest sequence"),
        ({"placement": {"actor": {"tp": 3}}}, "placement.actor.tp=3 does not divide num_attention_heads=8"),
    ],
)
def test_sft_combinations(sections: dict[str, dict[str, Any]], line: str) -> None:
    with pytest.raises(ConfigError, match="^" + line):
        Sft.check(config(**sections), 4)


def test_reward_model_job() -> None:
    job = {"data": {"max_prompt_length": 30, "max_response_length": 20, "val_files": ["val.parquet"]}}
    found = RewardModel.check(config(**job, rm={"batch_size": 8}, placement={"reward": {"pp": 2}}), 4)
    assert (found.roles.keys(), found.roles["reward"].dp, found.rows[-1]) == ({"reward"}, 2, ("step", 16, "samples"))
    assert "reward (all)  tp 1  pp 2  dp 2" in derive.describe(found)
    for rm, line in (
        ({"max_token_len_per_gpu": 99}, "rm.max_token_len_per_gpu=99 holds no pair .* = 100; use 100 or more"),
        ({"eval_freq": 5}, "rm.eval_freq=5 evaluates, and data.val_files is empty"),
    ):
        empty = {"data": {**job["data"], "val_files": []}}
        with pytest.raises(ConfigError, match=line):
            RewardModel.check(config(**empty, rm=rm), 4)


def test_adapters_make_the_actor_the_reference_where_it_is_one() -> None:
    lora, kl = {"lora_rank": 8}, {"adv_estimator": "grpo", "use_kl_in_reward": True}
    rollout = {"n": 2}
    derived = derive.check(config(model=lora, algorithm=kl, rollout=rollout), 4)
    assert derived.needs_ref and derived.ref_in_actor and "ref" not in derived.roles
    for sections in ({"placement": {"ref": {"tp": 2}}, "model": lora}, {}):
        derived = derive.check(config(algorithm=kl, rollout=rollout, **sections), 4)
        assert derived.needs_ref and not derived.ref_in_actor and "ref" in derived.roles


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"rollout": {"exact": True}}, "model.lora_rank=8 with rollout.exact=true"),
        ({"teacher": {"model": {"lora_rank": 2}}}, "teacher.model.lora_rank=2: only the policy has adapters"),
    ],
)
def test_what_adapters_do_not_go_with(sections: dict[str, Any], line: str) -> None:
    assert line in refusal(1, model={"lora_rank": 8}, **sections)
    with pytest.raises(ConfigError, match="`hpcrl rm` trains a whole model"):
        RewardModel.check(config(model={"lora_rank": 8}), 1)


@pytest.mark.parametrize(
    ("judge", "line"),
    [
        ({"template": "Rate {prompt}"}, "reward.judge: the template has no {response}, which kind=score needs; add it"),
        ({"kind": "pairwise"}, "reward.judge.kind=pairwise compares the responses to a prompt, and 1 is drawn; use"),
        ({"template": "{response}", "template_path": "x"}, "reward.judge.template and reward.judge.template_path are"),
        ({"model": {"init_from": "runs/x"}}, "weights are named by reward.judge.init_from; set that"),
        ({"max_prompt_length": 9000}, "max_num_batched_tokens=8192 is less than reward.judge.max_prompt_length=9000"),
    ],
)
def test_what_a_judge_cannot_do(judge: dict[str, Any], line: str) -> None:
    assert line in refusal(4, reward={"judge": {"enable": True, **judge}})
    assert "judge" not in derive.check(config(reward={"judge": judge}), 4).roles


def test_a_judge_has_a_layout_of_its_own() -> None:
    judge = {"reward": {"judge": {"enable": True}}}
    derived = derive.check(config(placement={"judge": {"tp": 2}}, **judge), 4)
    assert (derived.roles["judge"].tp, derived.roles["judge"].dp) == (2, 2)
    assert "placement.judge.pp=2 is not supported: a rollout engine splits" in refusal(
        4, placement={"judge": {"pp": 2}}, **judge
    )
    pools = {"pools": {"train": "1", "generate": "2-3"}, **dict.fromkeys(("actor", "critic"), {"pool": "train"})}
    generating = dict.fromkeys(("rollout", "judge"), {"pool": "generate"})
    line = refusal(4, placement=pools | generating, async_training={"mode": "bounded_staleness"}, **judge)
    assert "placement.judge shares 2-3 with placement.rollout; give them disjoint pools" in line
