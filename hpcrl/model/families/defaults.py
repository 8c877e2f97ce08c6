"""The meaning of an absent key of config.json: the default of the family's config class in `transformers`. No torch.

Keys that change the shape of a weight have no default, except those that published files leave out: there the check of
the weights finds a default that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.runtime.exits import InputError

_COMMON = {
    "num_key_value_heads": None,  # as many as num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_LAYERS_WITH_WINDOW = _WINDOW | {"max_window_layers": 28, "layer_types": None}
_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
# transformers 4.57 and 5 have different defaults of rope_theta.
_QWEN3_VL = {key: value for key, value in _COMMON.items() if key != "rope_theta"} | {"max_position_embeddings": 128000}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": _COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
    },
    "qwen2": _COMMON | _LAYERS_WITH_WINDOW | {"num_key_value_heads": 32},
    "qwen3": _COMMON | _LAYERS_WITH_WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": _COMMON
    | _WINDOW
    | _QWEN_MOE
    | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "qwen2_5_vl": _COMMON
    | _LAYERS_WITH_WINDOW
    | {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80},
    "qwen3_vl": _QWEN3_VL | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_moe": _QWEN3_VL | _QWEN_MOE | {"num_key_value_heads": 16, "num_experts_per_tok": 4},
    "deepseek_v2": _COMMON
    | {
        "q_lora_rank": 1536,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "deepseek_v3": _COMMON
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
_SLIDING = "sliding_attention"  # one of layer_types
# With a meaning of its own.
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "n_shared_experts")


def with_defaults(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return config.json, or its section on the text model, with the family's defaults for keys that are absent or null
    without a meaning."""
    given = {key: value for key, value in config.items() if value is not None or key in _MAY_BE_NULL}
    return {**DEFAULTS[family], **given}


def window_of(config: Mapping[str, Any], family: str) -> int | None:
    """Return the tokens that attention sees in some layer, None for all. config: with defaults."""
    own = {key: config[key] for key in DEFAULTS[family]}  # other families ignore these keys
    types, first = own.get("layer_types"), own.get("max_window_layers", 0)
    if types is not None and (not isinstance(types, list) or {*map(str, types)} - {"full_attention", _SLIDING}):
        raise InputError(f"layer_types={types!r}; expected full_attention or {_SLIDING} of each layer")
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputError(f"max_window_layers={first!r}; expected a whole number")
    some = first < config["num_hidden_layers"] if types is None else _SLIDING in types
    return own.get("sliding_window") if some and own.get("use_sliding_window", True) else None
