"""GLM-4.5 to 4.7: partial rotary embedding, and the experts of DeepSeek-V3. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.deepseek import MLPS, dense_layers, sigmoid_mixture
from hpcrl.model.families.family import (
    ATTENTION,
    COMMON,
    ENDS,
    PARTIAL,
    QK_NORM,
    QKV_BIAS,
    Family,
    attention_of,
    head_dim_of,
    rope_of,
)

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "glm4_moe": COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        PARTIAL: 0.5,
    }
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {"qkv_bias": bool(config["attention_bias"]), "qk_norm": "head" if config["use_qk_norm"] else ""}
    attention = attention_of(config, rope_of(config, head_dim_of(config)), **options)
    dense = FeedForward(config["hidden_size"], config["intermediate_size"])
    mixture, count = sigmoid_mixture(config), dense_layers(config)
    layers = range(config["num_hidden_layers"])
    return {"blocks": tuple(Layer(attention, dense if layer < count else mixture, Norms()) for layer in layers)}


FAMILIES = {
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", {**ENDS, **ATTENTION, **QKV_BIAS, **QK_NORM, **MLPS}, {"hidden_act": "silu"}, _fields
    )
}
