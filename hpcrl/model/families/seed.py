"""Seed-OSS: Llama with biases of queries, keys and values. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.families.family import COMMON, LLAMA, QKV_BIAS, Family
from hpcrl.model.shape import ModelShape

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "seed_oss": COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    }
}


def _keys(shape: ModelShape) -> dict[str, Any]:
    return {"attention_bias": shape.qkv_bias}


FAMILIES = {
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {**LLAMA, **QKV_BIAS},
        {"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
        lambda config: {"qkv_bias": bool(config["attention_bias"])},
        _keys,
    )
}
