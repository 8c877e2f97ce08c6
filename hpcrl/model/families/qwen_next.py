"""Qwen3-Next and Qwen3.5: gated delta nets and gated attention in one list of layers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcrl.model.blocks.block import Block, Layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.gated_delta import GatedDelta
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    COMMON,
    FULL,
    HF,
    LLAMA,
    MEGATRON,
    NO_BIAS,
    PARTIAL,
    QK_NORM,
    QWEN_MLP,
    Family,
    Names,
    attention_of,
    head_dim_of,
    in_language_model,
    layer_types_of,
    rope_of,
)
from hpcrl.runtime.exits import InputError

LINEAR = "linear_attention"  # of layer_types
_COMMON = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    PARTIAL: 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "qwen3_next": _COMMON | _EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    "qwen3_5_text": _COMMON | {"num_key_value_heads": 4},
    # Every layer has experts, so that no layer has the width of a dense one.
    "qwen3_5_moe_text": _COMMON | _EXPERTS | {"num_experts_per_tok": 8, "intermediate_size": 512},
}
DEFAULTS |= {family: DEFAULTS[f"{family}_text"] for family in ("qwen3_5", "qwen3_5_moe")}

_DELTA, _HF_DELTA = f"{MEGATRON}self_attention.", f"{HF}linear_attn."
_GATED_DELTA: Names = {
    # A tensor with the rows of all queries, then those of all keys and values.
    f"{_DELTA}conv1d.weight": (f"{_HF_DELTA}conv1d.weight",) * 3,
    **{f"{_DELTA}{name}": (f"{_HF_DELTA}{name}",) for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")},
}
# By key head, as in the model here.
_NEXT: Names = {
    **_GATED_DELTA,
    f"{_DELTA}in_proj.weight": (f"{_HF_DELTA}in_proj_qkvz.weight",),
    f"{_DELTA}in_proj_ba.weight": (f"{_HF_DELTA}in_proj_ba.weight",),
}
_3_5: Names = {
    **_GATED_DELTA,
    f"{_DELTA}in_proj.weight": (*[f"{_HF_DELTA}in_proj_qkv.weight"] * 3, f"{_HF_DELTA}in_proj_z.weight"),
    f"{_DELTA}in_proj_ba.weight": tuple(f"{_HF_DELTA}in_proj_{name}.weight" for name in "ba"),
}
_SHARED: Names = {
    **QWEN_MLP,
    f"{MEGATRON}mlp.shared_experts.linear_fc1.weight": tuple(
        f"{HF}mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up")
    ),
    f"{MEGATRON}mlp.shared_experts.linear_fc2.weight": (f"{HF}mlp.shared_expert.down_proj.weight",),
    f"{MEGATRON}mlp.shared_experts.gate_weight": (f"{HF}mlp.shared_expert_gate.weight",),
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    interval = config["full_attention_interval"]
    types = layer_types_of(config, lambda layer: LINEAR if (layer + 1) % interval else FULL, FULL, LINEAR)
    rope, norms = rope_of(config, head_dim_of(config)), Norms(zero_centered=True)
    mixers: dict[str, Block] = {
        FULL: attention_of(config, rope, qk_norm="head", zero_centered=True, has_gate=True),
        LINEAR: _delta(config),
    }
    dense = FeedForward(config["hidden_size"], config["intermediate_size"])
    mixture = _mixture(config) if "num_experts_per_tok" in config else dense
    step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return {
        "blocks": tuple(
            Layer(mixers[kind], dense if layer in without or (layer + 1) % step else mixture, norms)
            for layer, kind in enumerate(types)
        )
    }


def _delta(config: Mapping[str, Any]) -> GatedDelta:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise InputError(f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")
    widths = (config[f"linear_{name}"] for name in ("key_head_dim", "value_head_dim", "conv_kernel_dim"))
    return GatedDelta(config["hidden_size"], keys, values, *widths)


def _mixture(config: Mapping[str, Any]) -> MixtureOfExperts:
    return MixtureOfExperts(
        config["hidden_size"],
        config["num_experts"],
        config["moe_intermediate_size"],
        config["num_experts_per_tok"],
        norm_topk_prob=config.get("norm_topk_prob", True),
        shared_ffn_hidden_size=config["shared_expert_intermediate_size"],
        has_shared_gate=True,
    )


_BASE: Names = {**LLAMA, **QK_NORM}
_FURTHER = r"^mtp\."  # layers that predict further tokens
FAMILIES = {
    "qwen3_next": Family("Qwen3NextForCausalLM", {**_BASE, **_NEXT, **_SHARED}, NO_BIAS, _fields, others=_FURTHER),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", {**_BASE, **_3_5}, NO_BIAS, _fields, others=_FURTHER),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {**_BASE, **_3_5, **_SHARED},
        NO_BIAS | {"norm_topk_prob": True},
        _fields,
        others=_FURTHER,
    ),
}
FAMILIES |= {
    family: replace(
        FAMILIES[f"{family}_text"],
        architecture=architecture,
        names=in_language_model(FAMILIES[f"{family}_text"].names),
        tower="model.visual.",
    )
    for family, architecture in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}
