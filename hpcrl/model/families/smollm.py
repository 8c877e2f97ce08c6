"""SmolLM3: Llama with layers without rotary embedding. No torch."""

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
    SLIDING,
    Family,
    attention_of,
    head_dim_of,
    layer_types_of,
    positive,
    rope_of,
)
from hpcrl.runtime.exits import InputError

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "smollm3": COMMON
    | {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
    }
}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    count, turned = config["num_hidden_layers"], config["no_rope_layers"]
    if turned is None:
        interval = positive(config, "no_rope_layer_interval")
        turned = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(turned, list) or len(turned) != count:
        raise InputError(f"no_rope_layers={turned!r}; expected a list of num_hidden_layers={count} numbers")
    window = config["sliding_window"] if config["use_sliding_window"] else None
    default = [FULL if has_rope or window is None else SLIDING for has_rope in turned]
    types = layer_types_of(config, default.__getitem__, FULL, SLIDING)
    rope, mlp = rope_of(config, head_dim_of(config)), FeedForward(config["hidden_size"], config["intermediate_size"])
    windows = {FULL: None, SLIDING: window}
    attention = [
        attention_of(config, rope if has_rope else None, window=windows[kind])
        for has_rope, kind in zip(turned, types, strict=True)
    ]
    return {"blocks": tuple(Layer(mixer, mlp, Norms()) for mixer in attention)}


FAMILIES = {"smollm3": Family("SmolLM3ForCausalLM", LLAMA, NO_BIAS | {"mlp_bias": False}, _fields)}
