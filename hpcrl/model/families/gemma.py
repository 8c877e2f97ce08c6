"""Gemma 3, without its vision tower. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    COMMON,
    FULL,
    HF,
    LLAMA,
    MEGATRON,
    OUTPUT_NORMS,
    QK_NORM,
    SLIDING,
    Family,
    attention_of,
    head_dim_of,
    layer_types_of,
    positive,
    ropes_of,
)

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3_text": COMMON
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    }
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    pattern = positive(config, "sliding_window_pattern")
    types = layer_types_of(config, lambda layer: SLIDING if (layer + 1) % pattern else FULL, FULL, SLIDING)
    ropes = ropes_of(config, head_dim_of(config), config["rope_local_base_freq"])
    mlp = FeedForward(config["hidden_size"], config["intermediate_size"], "gelu_tanh")
    norms = Norms(before=True, after=True, zero_centered=True)
    options = {"qk_norm": "head", "zero_centered": True, "softmax_scale": config["query_pre_attn_scalar"] ** -0.5}
    windows = {FULL: None, SLIDING: config["sliding_window"]}
    attention = {kind: attention_of(config, ropes[kind], window=windows[kind], **options) for kind in windows}
    return {
        "blocks": tuple(Layer(attention[kind], mlp, norms) for kind in types),
        "embedding_scale": math.sqrt(config["hidden_size"]),
    }


FAMILIES = {
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **LLAMA,
            **QK_NORM,
            **OUTPUT_NORMS,
            f"{MEGATRON}pre_mlp_layernorm.weight": (f"{HF}pre_feedforward_layernorm.weight",),
        },
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        _fields,
    )
}
