"""Llama, Mistral and Mixtral. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.families.family import ATTENTION, COMMON, ENDS, LLAMA, NO_BIAS, Family, experts_mlp
from hpcrl.model.shape import ModelShape

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "llama": COMMON | {"max_position_embeddings": 2048},
    "mistral": COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
    },
}
_MIXTRAL_MLP = experts_mlp("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": config["num_local_experts"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
    }


def _mixtral_keys(shape: ModelShape) -> dict[str, Any]:
    return {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.moe_topk}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA, NO_BIAS | {"mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", LLAMA, NO_BIAS),
    "mixtral": Family(
        "MixtralForCausalLM", {**ENDS, **ATTENTION, **_MIXTRAL_MLP}, NO_BIAS, _mixtral_fields, _mixtral_keys
    ),
}
