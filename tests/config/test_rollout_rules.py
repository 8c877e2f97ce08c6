"""Rollout keys that cannot go together are refused in one line, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.derive import check
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError

DISJOINT = {
    "pools": {"train": "1-2", "gen": "3"},
    **{role: {"pool": "train"} for role in ("actor", "critic", "ref")},
    "rollout": {"pool": "gen"},
}

TOOLS = {"enable": True, "function_tool_path": "tools.py"}

CASES: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"engine": "tensorrt_llm"}}, "rollout.trtllm.model_dir is null"),
    (
        {
            "rollout": {"engine": "tensorrt_llm", "trtllm": {"design": "single_process", "model_dir": "llama"}},
            "placement": {"rollout": {"tp": 2}},
        },
        "single_process makes replicas of one rank, and placement.rollout.tp=2",
    ),
    (
        {"rollout": {"engine": "tensorrt_llm", "trtllm": {"model_dir": "llama"}}},
        "the engine's dtype would be float32; set rollout.dtype=bfloat16",
    ),
    (
        {"rollout": {"engine": "tensorrt_llm", "dtype": "bfloat16", "top_k": 2000, "trtllm": {"model_dir": "llama"}}},
        "rollout: top_k=2000 is more than TensorRT-LLM's sampler keeps; use 1024 or less, or -1",
    ),
    (
        {"rollout": {"engine": "vllm", "kv_cache_dtype": "fp8"}},
        "rollout.kv_cache_dtype=fp8 is for engine=native, and rollout.engine=vllm",
    ),
    ({"rollout": {"exact": True, "quantization": "fp8"}}, "rollout.quantization=fp8 with rollout.exact=true"),
    ({"rollout": {"engine": "vllm", "exact": True}}, "rollout.exact is for engine=native, and rollout.engine=vllm"),
    (
        {
            "rollout": {"engine": "tensorrt_llm", "dtype": "bfloat16", "trtllm": {"model_dir": "llama"}},
            "actor": {"router_replay": {"mode": "R3"}},
        },
        "router_replay.mode=R3: rollout.engine=tensorrt_llm does not report the experts of tokens; use R2",
    ),
    (
        {
            "actor": {"router_replay": {"mode": "R2"}},
            "algorithm": {"rollout_correction": {"bypass_mode": True}},
        },
        "router_replay.mode=R2 records in the forward pass before the update",
    ),
    ({"rollout": {"exact": True, "dtype": "bfloat16"}}, "model.dtype=float32 differs from rollout.dtype=bfloat16"),
    ({"rollout": {"exact": True}, "placement": {"actor": {"tp": 2}}}, "placement.actor.tp=2 differs from"),
    ({"rollout": {"multi_turn": {"enable": True}}}, "multi_turn.enable=true without tools, a user or an environment"),
    (
        {"algorithm": {"adv_estimator": "gigpo"}, "rollout": {"n": 2}},
        "adv_estimator=gigpo compares turns of an environment, and there is none",
    ),
    (
        {"rollout": {"multi_turn": {"enable": True, "environment": {"path": "e.py"}, "interaction_path": "u.py"}}},
        "environment.path and rollout.multi_turn.interaction_path: an environment has tools of its own; leave one out",
    ),
    ({"rollout": {"multi_turn": TOOLS, "ignore_eos": True}}, "never ends a turn"),
    ({"async_training": {"mode": "one_step_off"}}, "rank 0 runs the loop"),
    (
        {
            "async_training": {"mode": "bounded_staleness"},
            "placement": {**DISJOINT, "critic": {"pool": "gen"}},
        },
        "placement.critic shares 3 with placement.rollout",
    ),
    ({"async_training": {"mode": "one_step_off"}, "trainer": {"rollouts_from": "runs/x"}}, "replays recorded ones"),
    (
        {
            "async_training": {"mode": "bounded_staleness"},
            "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
            "rollout": {"n": 2},
        },
        "has no batches of generation to count",
    ),
]


def config_of(sections: dict[str, Any]) -> Config:
    data = {"train_files": ["train.parquet"], "max_prompt_length": 16, "max_response_length": 16}
    return Config.model_validate({"data": data, **sections})


@pytest.mark.parametrize(("sections", "line"), CASES)
def test_what_cannot_work_is_refused_in_one_line(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(config_of(sections), 4)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("mode", ["one_step_off", "bounded_staleness"])
def test_asynchronous_modes_take_disjoint_pools_without_rank_0(mode: str) -> None:
    sections = {"async_training": {"mode": mode}, "placement": DISJOINT}
    assert check(config_of(sections), 4).roles["rollout"].ranks == (3,)


def test_remax_does_not_go_with_generation_that_never_stops() -> None:
    sections = {
        "algorithm": {"adv_estimator": "remax"},
        "async_training": {"mode": "bounded_staleness"},
        "placement": DISJOINT,
    }
    with pytest.raises(ConfigError, match="compares with a greedy response"):
        check(config_of(sections), 4)
