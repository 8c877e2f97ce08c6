"""Engine arguments from the configuration, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm import signatures
from hpcrl.rollout.engines.tensorrt_llm.arguments import check_architecture, engine_arguments, kv_bytes_per_token
from hpcrl.runtime.exits import InputError

SHAPE = ModelShape(2, 64, 160, 8, 4, 8, 500)


def config(**rollout: Any) -> Config:
    base = {"engine": "tensorrt_llm", "dtype": "bfloat16", "max_num_seqs": 16, "trtllm": {"model_dir": "/m"}}
    lengths = {"max_prompt_length": 60, "max_response_length": 40}
    return Config.model_validate({"rollout": base | rollout, "data": lengths})


def test_what_an_engine_is_built_with() -> None:
    found = engine_arguments(config(), SHAPE, 2)
    assert tuple(found) == signatures.ENGINE
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 1)
    assert found["allreduce_strategy"] == "NCCL" and found["load_format"] == "dummy"
    assert (found["max_seq_len"], found["max_input_len"], found["max_batch_size"]) == (100, 100, 16)
    assert found["cuda_graph_config"]["max_batch_size"] == 16 and found["enable_sleep"]
    eager = engine_arguments(config(enforce_eager=True, free_cache_engine=False), SHAPE, 2)
    assert eager["cuda_graph_config"] is None and not eager["enable_sleep"]


def test_the_cache_is_what_the_job_can_use_or_what_it_may_take() -> None:
    whole = engine_arguments(config(), SHAPE, 2)["kv_cache_config"]
    assert whole["max_tokens"] == 16 * 128  # 100 tokens are 4 blocks of 32
    assert whole["free_gpu_memory_fraction"] == 0.5
    bounded = engine_arguments(config(kv_cache_gib=2**-13), SHAPE, 2)["kv_cache_config"]
    assert bounded["max_tokens"] == 2**17 // kv_bytes_per_token(SHAPE, 2, 2) < whole["max_tokens"]
    assert bounded["free_gpu_memory_fraction"] == 1.0
    ample = engine_arguments(config(kv_cache_gib=4.0), SHAPE, 2)["kv_cache_config"]
    assert ample["max_tokens"] == whole["max_tokens"]


def test_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(SHAPE, 1, 2) == 2 * 2 * 4 * 8 * 2
    assert kv_bytes_per_token(SHAPE, 8, 2) == kv_bytes_per_token(SHAPE, 4, 2)  # a head cannot be halved


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"dtype": "float32"}, "set rollout.dtype=bfloat16"),
        ({"dtype": None}, "dtype would be float32"),
        ({"max_num_batched_tokens": 8}, "rollout.max_num_batched_tokens=8"),
        ({"kv_cache_gib": 1e-6}, "holds 4 tokens"),
    ],
)
def test_refusals(keys: dict[str, Any], line: str) -> None:
    with pytest.raises((ConfigError, InputError), match=line):
        engine_arguments(config(**keys), SHAPE, 1)


HF: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 500,
    "rms_norm_eps": 1e-5,
}


def write(folder: Path, **keys: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(HF | keys))
    return folder


def test_a_model_directory_of_the_same_architecture(tmp_path: Path) -> None:
    check_architecture(write(tmp_path), SHAPE)
    check_architecture(write(tmp_path, head_dim=None, rope_theta=10000.0, tie_word_embeddings=False), SHAPE)
    other = replace(SHAPE, rope_theta=5e5)
    check_architecture(write(tmp_path, rope_theta=5e5), other)
    check_architecture(write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), other)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, but the trained model has 2"),
        ({"num_key_value_heads": None}, "num_key_value_heads=8"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=500000.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type=linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}}, "rope_type=linear"),
        ({"model_type": "qwen2"}, "attention_bias=True"),
        ({"model_type": "gpt2"}, "model_type=gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_a_model_directory_of_another_architecture(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        check_architecture(write(tmp_path, **keys), SHAPE)


def test_a_model_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        check_architecture(tmp_path, SHAPE)
