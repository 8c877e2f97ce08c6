"""Qwen2 and Qwen3, with their mixtures of experts and vision-language models. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.families.family import (
    COMMON,
    HF,
    LLAMA,
    MEGATRON,
    NO_BIAS,
    QK_NORM,
    QKV_BIAS,
    QWEN_MLP,
    Family,
    Names,
    in_language_model,
)
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_LAYERS_WITH_WINDOW = _WINDOW | {"max_window_layers": 28, "layer_types": None}
_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
# transformers 4.57 and 5 have different defaults of rope_theta.
_QWEN3_VL = {key: value for key, value in COMMON.items() if key != "rope_theta"} | {"max_position_embeddings": 128000}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "qwen2": COMMON | _LAYERS_WITH_WINDOW | {"num_key_value_heads": 32},
    "qwen3": COMMON | _LAYERS_WITH_WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": COMMON
    | _WINDOW
    | _QWEN_MOE
    | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "qwen2_5_vl": COMMON
    | _LAYERS_WITH_WINDOW
    | {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80},
    "qwen3_vl": _QWEN3_VL | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_moe": _QWEN3_VL | _QWEN_MOE | {"num_key_value_heads": 16, "num_experts_per_tok": 4},
}
_STACKED_MLP: Names = {
    f"{MEGATRON}mlp.router.weight": (f"{HF}mlp.gate.weight",),
    f"{MEGATRON}mlp.experts.local_experts.#.linear_fc1.weight": (f"{HF}mlp.experts.gate_up_proj[#]",),
    f"{MEGATRON}mlp.experts.local_experts.#.linear_fc2.weight": (f"{HF}mlp.experts.down_proj[#]",),
}


def _qwen_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    layers = range(config["num_hidden_layers"])
    return {
        "qk_norm": True,
        "num_experts": config.get("num_local_experts") or config["num_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
        "moe_norm_topk_prob": config["norm_topk_prob"],
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    }


def _qwen3_vl_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
    if hidden in (ffn, 2 * ffn):
        raise InputError(
            f"moe_intermediate_size={ffn} is hidden_size={hidden} or half of it, so the files do not show whether the "
            "experts' matrices are transposed; use another model"
        )
    return _qwen_moe_fields({**config, "norm_topk_prob": True})


def _qwen_moe_keys(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.moe_topk,
        "moe_intermediate_size": shape.moe_ffn_hidden_size,
        "norm_topk_prob": shape.moe_norm_topk_prob,
        "mlp_only_layers": list(shape.dense_layers),
        "decoder_sparse_step": 1,
    }


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", {**LLAMA, **QKV_BIAS}, {"hidden_act": "silu"}, lambda _: {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {**LLAMA, **QK_NORM}, NO_BIAS, lambda _: {"qk_norm": True}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**LLAMA, **QK_NORM, **QWEN_MLP}, NO_BIAS, _qwen_moe_fields, _qwen_moe_keys
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {**LLAMA, **QKV_BIAS},
        {"hidden_act": "silu"},
        lambda _: {"qkv_bias": True},
        tower="visual.",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        in_language_model({**LLAMA, **QK_NORM}),
        NO_BIAS,
        lambda _: {"qk_norm": True},
        tower="model.visual.",
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        in_language_model({**LLAMA, **QK_NORM, **_STACKED_MLP}),
        NO_BIAS | {"norm_topk_prob": True},
        _qwen3_vl_moe_fields,
        _qwen_moe_keys,
        tower="model.visual.",
    ),
}
