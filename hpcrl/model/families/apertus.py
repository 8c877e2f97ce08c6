"""Apertus: xIELU without a gate, norms of queries and keys. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.feed_forward import XIELU, FeedForward
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    COMMON,
    HF,
    LLAMA,
    MEGATRON,
    QK_NORM,
    Family,
    Names,
    attention_of,
    head_dim_of,
    rope_of,
)

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "apertus": COMMON
    | {
        "max_position_embeddings": 65536,
        "rope_theta": 12000000.0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
    }
}
_NAMES: Names = {
    **LLAMA,
    **QK_NORM,
    f"{MEGATRON}input_layernorm.weight": (f"{HF}attention_layernorm.weight",),
    f"{MEGATRON}pre_mlp_layernorm.weight": (f"{HF}feedforward_layernorm.weight",),
    f"{MEGATRON}mlp.linear_fc1.weight": (f"{HF}mlp.up_proj.weight",),
    **{f"{MEGATRON}mlp.activation_func.{number}": (f"{HF}mlp.act_fn.{number}",) for number in XIELU},
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = attention_of(config, rope_of(config, head_dim_of(config)), qk_norm="head")
    mlp = FeedForward(config["hidden_size"], config["intermediate_size"], "xielu", is_gated=False)
    return {"blocks": (Layer(attention, mlp, Norms()),) * config["num_hidden_layers"]}


FAMILIES = {
    "apertus": Family(
        "ApertusForCausalLM",
        _NAMES,
        {"hidden_act": "xielu", "attention_bias": False},
        _fields,
        others=r"\.mlp\.act_fn\.(beta|eps)$",  # constants of the activation
    )
}
