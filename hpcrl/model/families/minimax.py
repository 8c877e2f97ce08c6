"""MiniMax-M2: norms of all heads together, partial rotary embedding, experts by sigmoids. No torch."""

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
    HF,
    MEGATRON,
    MIXTRAL_MLP,
    PARTIAL,
    QK_NORM,
    Family,
    attention_of,
    head_dim_of,
    positive,
    rope_of,
)

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "minimax_m2": COMMON
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_experts_per_tok": 8,
        "rotary_dim": None,
    }
}
_BIAS = {f"{MEGATRON}mlp.router.expert_bias": (f"{HF}block_sparse_moe.e_score_correction_bias",)}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim, rotated = head_dim_of(config), config["rotary_dim"]
    partial = {} if rotated is None else {PARTIAL: positive(config, "rotary_dim") / head_dim}
    attention = attention_of(config, rope_of({**partial, **config}, head_dim), qk_norm="all")
    mixture = MixtureOfExperts(
        config["hidden_size"],
        config["num_local_experts"],
        config["intermediate_size"],
        config["num_experts_per_tok"],
        score_function="sigmoid",
        has_score_bias=True,
    )
    return {"blocks": (Layer(attention, mixture, Norms()),) * config["num_hidden_layers"]}


FAMILIES = {
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {**ENDS, **ATTENTION, **QK_NORM, **MIXTRAL_MLP, **_BIAS},
        {"hidden_act": "silu", "attention_bias": False, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
        _fields,
        others=r"^model\.mtp\.|\.mtp_layers\.",
    )
}
