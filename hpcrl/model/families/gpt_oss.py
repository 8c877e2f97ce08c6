"""GPT-OSS: attention sinks, alternating windows, biases, and experts with a clamped SwiGLU. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    ATTENTION,
    COMMON,
    ENDS,
    FULL,
    HF,
    MEGATRON,
    QKV_BIAS,
    SLIDING,
    Family,
    Names,
    attention_of,
    head_dim_of,
    layer_types_of,
    rope_of,
)

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gpt_oss": COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_parameters": _ROPE,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "layer_types": None,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
}
_EXPERT, _EXPERTS = f"{MEGATRON}mlp.experts.local_experts.#.", f"{HF}mlp.experts."
_EVERY_SECOND = ("[0::2]", "[1::2]")  # gate and up are interleaved
_NAMES: Names = {
    **ENDS,
    **ATTENTION,
    **QKV_BIAS,
    f"{MEGATRON}self_attention.linear_proj.bias": (f"{HF}self_attn.o_proj.bias",),
    f"{MEGATRON}self_attention.core_attention.softmax_offset": (f"{HF}self_attn.sinks",),
    **{f"{MEGATRON}mlp.router.{part}": (f"{HF}mlp.router.{part}",) for part in ("weight", "bias")},
    f"{_EXPERT}linear_fc1.weight": tuple(f"{_EXPERTS}gate_up_proj[#].T{rows}" for rows in _EVERY_SECOND),
    f"{_EXPERT}linear_fc1.bias": tuple(f"{_EXPERTS}gate_up_proj_bias[#]{rows}" for rows in _EVERY_SECOND),
    f"{_EXPERT}linear_fc2.weight": (f"{_EXPERTS}down_proj[#].T",),
    f"{_EXPERT}linear_fc2.bias": (f"{_EXPERTS}down_proj_bias[#]",),
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(config["attention_bias"])
    options = {"qkv_bias": has_bias, "has_output_bias": has_bias, "has_sinks": True}
    rope = rope_of(config, head_dim_of(config))
    windows = {FULL: None, SLIDING: config["sliding_window"]}
    mixture = MixtureOfExperts(
        config["hidden_size"],
        config["num_local_experts"],
        config["intermediate_size"],
        config["num_experts_per_tok"],
        has_bias=True,
        swiglu_alpha=float(config["swiglu_alpha"]),
        swiglu_limit=float(config["swiglu_limit"]),
    )
    attention = {kind: attention_of(config, rope, window=windows[kind], **options) for kind in windows}
    types = layer_types_of(config, lambda layer: FULL if layer % 2 else SLIDING, FULL, SLIDING)
    return {"blocks": tuple(Layer(attention[kind], mixture, Norms()) for kind in types)}


FAMILIES = {
    "gpt_oss": Family("GptOssForCausalLM", _NAMES, {"hidden_act": "silu"}, _fields, quantised="mxfp4"),
}
