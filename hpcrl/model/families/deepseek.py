"""DeepSeek-V2 and V3: latent attention, and experts in groups; Kimi-K2 is V3 by another name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.families.family import COMMON, ENDS, HF, LAYER, MEGATRON, MLP, NO_BIAS, QWEN_MLP, Family, Names
from hpcrl.model.shape import LatentAttention, ModelShape
from hpcrl.runtime.exits import InputError

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "deepseek_v2": COMMON
    | {
        "q_lora_rank": 1536,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "deepseek_v3": COMMON
    | {
        "q_lora_rank": 1536,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
    },
}
# Keys that must have these values if they are present.
_FIXED = {"moe_layer_freq": 1}
V2_FIXED = _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False}
V3_FIXED = _FIXED | {
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}
_LATENT_ATTENTION: Names = {
    **LAYER,
    **{
        f"{MEGATRON}self_attention.{megatron}.weight": (f"{HF}self_attn.{hf}.weight",)
        for megatron, hf in {
            "linear_q_proj": "q_proj",
            "linear_q_down_proj": "q_a_proj",
            "q_layernorm": "q_a_layernorm",
            "linear_q_up_proj": "q_b_proj",
            "linear_kv_down_proj": "kv_a_proj_with_mqa",
            "kv_layernorm": "kv_a_layernorm",
            "linear_kv_up_proj": "kv_b_proj",
        }.items()
    },
}
_SHARED_EXPERTS: Names = {
    f"{MEGATRON}mlp.router.expert_bias": (f"{HF}mlp.gate.e_score_correction_bias",),
    f"{MEGATRON}mlp.shared_experts.linear_fc1.weight": tuple(
        f"{HF}mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    f"{MEGATRON}mlp.shared_experts.linear_fc2.weight": (f"{HF}mlp.shared_experts.down_proj.weight",),
}
MLPS: Names = {**MLP, **QWEN_MLP, **_SHARED_EXPERTS}
_DEEPSEEK: Names = {**ENDS, **_LATENT_ATTENTION, **MLPS}


def v2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(f"topk_method={method}; expected greedy or group_limited_greedy; use another model")
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


def dense_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers before the others have no experts."""
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if not isinstance(dense, int) or not 0 <= dense < layers:
        raise InputError(f"first_k_dense_replace={dense!r} of num_hidden_layers={layers}; expected less, 0 at least")
    return dense


def shared_experts(config: Mapping[str, Any]) -> int:
    count = config["n_shared_experts"] or 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 10_000:
        raise InputError(f"n_shared_experts={count!r}; expected a whole number, 0 at least")
    return count


def sigmoid_mixture(config: Mapping[str, Any]) -> MixtureOfExperts:
    """Return V3's mixture of experts, for families with blocks of their own."""
    groups, width = _groups(config), config["moe_intermediate_size"]
    return MixtureOfExperts(
        config["hidden_size"],
        config["n_routed_experts"],
        width,
        config["num_experts_per_tok"],
        norm_topk_prob=config["norm_topk_prob"],
        shared_ffn_hidden_size=shared_experts(config) * width,
        score_function="sigmoid",
        has_score_bias=True,
        num_groups=groups["moe_num_groups"],
        topk_groups=groups["moe_topk_groups"],
        group_best=2,
        routed_scale=float(config["routed_scaling_factor"]),
    )


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    width = "moe_intermediate_size"
    mla = LatentAttention(
        q_lora_rank=config["q_lora_rank"],
        **{name: config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    )
    return {
        "mla": mla,
        "num_query_groups": config["num_attention_heads"],
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config[width],
        "moe_shared_ffn_hidden_size": shared_experts(config) * config[width],
        "moe_topk": config["num_experts_per_tok"],
        "moe_routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": tuple(range(dense_layers(config))),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    experts, groups, chosen = (config[key] for key in ("n_routed_experts", "n_group", "topk_group"))
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
        "head_dim": shape.rope.dim,  # transformers takes the rotary embedding's width from it
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


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _DEEPSEEK, NO_BIAS | V2_FIXED, v2_fields, v2_keys),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK, NO_BIAS | V3_FIXED, v3_fields, v3_keys),
}
DEFAULTS["kimi_k2"], FAMILIES["kimi_k2"] = DEFAULTS["deepseek_v3"], FAMILIES["deepseek_v3"]
