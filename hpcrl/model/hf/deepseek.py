"""config.json of DeepSeek-V2 and V3: latent attention, experts in groups, experts of every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpcrl.model.shape import LatentAttention, ModelShape
from hpcrl.runtime.exits import InputError

# Keys that must have these values, in so far as they are there.
_FIXED = {"moe_layer_freq": 1}
V2_FIXED = _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False}
V3_FIXED = _FIXED | {
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}


def v2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(f"topk_method={method}; expected greedy or group_limited_greedy, so take another model")
    groups = _groups(config) if method == "group_limited_greedy" else {}
    return {**_fields(config), **groups, "moe_norm_topk_prob": False}


def v3_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_fields(config),
        **_groups(config),
        "moe_group_best": 2,
        "moe_norm_topk_prob": True,
        "moe_score_function": "sigmoid",
        "moe_score_bias": True,
    }


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, dense, width = config["num_hidden_layers"], config.get("first_k_dense_replace", 0), "moe_intermediate_size"
    if not isinstance(dense, int) or not 0 <= dense < layers:
        raise InputError(f"first_k_dense_replace={dense!r} of num_hidden_layers={layers}; expected less, 0 at least")
    mla = LatentAttention(
        q_lora_rank=config.get("q_lora_rank"),
        **{name: config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    )
    return {
        "mla": mla,
        "num_query_groups": config["num_attention_heads"],
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config[width],
        "moe_shared_ffn_hidden_size": config.get("n_shared_experts", 0) * config[width],
        "moe_topk": config["num_experts_per_tok"],
        "moe_routed_scale": float(config.get("routed_scaling_factor", 1.0)),
        "dense_layers": tuple(range(dense)),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    experts, groups, chosen = config["n_routed_experts"], config.get("n_group", 1), config.get("topk_group", 1)
    if experts % groups or chosen > groups or config["num_experts_per_tok"] > chosen * (experts // groups):
        raise InputError(
            f"num_experts_per_tok={config['num_experts_per_tok']} in topk_group={chosen} of n_group={groups} groups of "
            f"n_routed_experts={experts}; expected groups of one size, with enough experts"
        )
    return {"moe_num_groups": groups, "moe_topk_groups": chosen}


def v2_keys(shape: ModelShape) -> dict[str, Any]:
    return {**_keys(shape), "topk_method": "greedy" if shape.moe_num_groups == 1 else "group_limited_greedy"}


def v3_keys(shape: ModelShape) -> dict[str, Any]:
    return {**_keys(shape), "num_nextn_predict_layers": 0}


def _keys(shape: ModelShape) -> dict[str, Any]:
    assert shape.mla is not None
    return {
        **asdict(shape.mla),
        "head_dim": shape.rope_dim,  # transformers takes the rotary embedding's width from it
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": shape.moe_shared_ffn_hidden_size // shape.moe_ffn_hidden_size,
        "moe_intermediate_size": shape.moe_ffn_hidden_size,
        "num_experts_per_tok": shape.moe_topk,
        "norm_topk_prob": shape.moe_norm_topk_prob,
        "routed_scaling_factor": shape.moe_routed_scale,
        "first_k_dense_replace": len(shape.dense_layers),
        "n_group": shape.moe_num_groups,
        "topk_group": shape.moe_topk_groups,
    }
