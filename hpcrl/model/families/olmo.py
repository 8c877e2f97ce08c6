"""OLMo 3: norms after attention and MLP, norms of all query and key heads together, windows. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.family import (
    COMMON,
    FULL,
    LLAMA,
    NO_BIAS,
    OUTPUT_NORMS,
    QK_NORM,
    SLIDING,
    Family,
    attention_of,
    head_dim_of,
    layer_types_of,
    ropes_of,
)

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "olmo3": COMMON
    | {
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "layer_types": None,
    }
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    types = layer_types_of(config, lambda layer: SLIDING if (layer + 1) % 4 else FULL, FULL, SLIDING)
    ropes = ropes_of(config, head_dim_of(config), DEFAULTS["olmo3"]["rope_theta"])
    mlp, norms = FeedForward(config["hidden_size"], config["intermediate_size"]), Norms(before=False, after=True)
    windows = {FULL: None, SLIDING: config["sliding_window"]}
    attention = {kind: attention_of(config, ropes[kind], qk_norm="all", window=windows[kind]) for kind in windows}
    return {"blocks": tuple(Layer(attention[kind], mlp, norms) for kind in types)}


FAMILIES = {"olmo3": Family("Olmo3ForCausalLM", {**LLAMA, **QK_NORM, **OUTPUT_NORMS}, NO_BIAS, _fields)}
