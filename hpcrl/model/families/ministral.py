"""Ministral: Mistral with a window in some layers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.model.families.family import COMMON, LLAMA, NO_BIAS, Family

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "ministral": COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "layer_types": None,
    }
}
FAMILIES = {"ministral": Family("MinistralForCausalLM", LLAMA, NO_BIAS)}
