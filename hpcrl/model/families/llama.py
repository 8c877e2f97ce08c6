"""Llama, and EXAONE, Ministral, Mistral, Mixtral and Seed-OSS, which have its names. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    ATTENTION,
    COMMON,
    ENDS,
    LLAMA,
    MIXTRAL_MLP,
    NO_BIAS,
    OUTPUT_NORMS,
    QK_NORM,
    QKV_BIAS,
    Family,
)
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "llama": COMMON | {"max_position_embeddings": 2048},
    "mistral": COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "ministral": COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "layer_types": None,  # some have the window
    },
    "exaone4": COMMON
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    "mixtral": COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
    },
    "seed_oss": COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
}
_MIXTRAL_KEYS = {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"}  # and fields of ModelShape


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = {field: config[key] for key, field in _MIXTRAL_KEYS.items()}
    return experts | {"moe_ffn_hidden_size": config["intermediate_size"]}


def _mixtral_keys(shape: ModelShape) -> dict[str, Any]:
    return {key: getattr(shape, field) for key, field in _MIXTRAL_KEYS.items()}


def _exaone_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["sliding_window"] is not None:
        raise InputError(
            f"sliding_window={config['sliding_window']}: layers without rotary embedding are not supported; use a "
            "model with null"
        )
    return {"qk_norm": True, "norms": Norms(before=False, after=True)}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA, NO_BIAS | {"mlp_bias": False}),
    "exaone4": Family(
        "Exaone4ForCausalLM", {**LLAMA, **QK_NORM, **OUTPUT_NORMS}, {"hidden_act": "silu"}, _exaone_fields
    ),
    "ministral": Family("MinistralForCausalLM", LLAMA, NO_BIAS),
    "mistral": Family("MistralForCausalLM", LLAMA, NO_BIAS),
    "mixtral": Family(
        "MixtralForCausalLM", {**ENDS, **ATTENTION, **MIXTRAL_MLP}, NO_BIAS, _mixtral_fields, _mixtral_keys
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {**LLAMA, **QKV_BIAS},
        {"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
        lambda config: {"qkv_bias": bool(config["attention_bias"])},
        lambda shape: {"attention_bias": shape.qkv_bias},
    ),
}
