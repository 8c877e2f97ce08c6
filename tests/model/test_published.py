"""Published config.json, in the keys that say the architecture: the parameters are as many as their authors say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.loader import load_config
from hpcrl.model.architecture import shape_from_yaml
from hpcrl.model.families.config_json import shape_from_hf
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape

CONFIGS = Path(__file__).parents[2] / "configs"
# Billions of parameters, without layers that predict further tokens.
TEMPLATES = {
    "apertus_8b": 8.05,
    "gemma3_12b": 11.77,
    "glm_4_5_air": 106.9,
    "gpt_oss_20b": 20.9,
    "nemotron_3_nano": 31.6,
    "qwen3_next_80b": 79.7,
    "qwen3_5_35b": 35.1,
}
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "SmolLM3-3B": (
        3.08,
        {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "rope_theta": 5000000.0,
            "rope_scaling": None,
        },
    ),
    "Ministral-8B-Instruct-2410": (
        8.02,
        {
            "model_type": "ministral",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "sliding_window": 32768,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
            "rope_theta": 100000000.0,
        },
    ),
    "Seed-OSS-36B-Instruct": (
        36.15,
        {
            "model_type": "seed_oss",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 155136,
            "rope_theta": 10000000.0,
            "rope_scaling": {"rope_type": "default"},
        },
    ),
    "Olmo-3-7B-Instruct": (
        7.3,
        {
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100278,
            "max_position_embeddings": 65536,
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "Nemotron-H-8B-Base-8K": (
        8.1,
        {
            "model_type": "nemotron_h",
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "vocab_size": 131072,
        },
    ),
    "MiniMax-M2": (
        228.7,
        {
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rotary_dim": 64,
            "rope_theta": 5000000,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "vocab_size": 200064,
        },
    ),
    "Kimi-K2-Instruct": (
        1026.0,
        {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            "vocab_size": 163840,
        },
    ),
}


def billions(shape: ModelShape) -> float:
    return sum(math.prod(shard.global_shape) for shard in shards(shape)) / 1e9


@pytest.mark.parametrize("name", TEMPLATES)
def test_parameters_of_templates(name: str) -> None:
    shape = shape_from_yaml(load_config(CONFIGS / f"{name}.yaml").model, 0)
    assert billions(shape) == pytest.approx(TEMPLATES[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    total, config = PUBLISHED[name]
    assert billions(shape_from_hf(config)) == pytest.approx(total, rel=0.005)
