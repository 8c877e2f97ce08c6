"""The rotary embedding in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcrl.model.shape import RopeScaling
from hpcrl.runtime.exits import InputError

Rope = tuple[float, RopeScaling | None]


def rope_from_hf(config: Mapping[str, Any], where: str) -> Rope:
    """Base and scaling; raises InputError for a kind that our model does not compute."""
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(scaling if isinstance(scaling := config.get("rope_scaling"), dict) else {}),
    }
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InputError(f"{where}: rope_parameters={rope!r}; expected one rotary embedding for all layers")
    theta, kind = rope.get("rope_theta") or 10000.0, rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"{where}: partial_rotary_factor={rope['partial_rotary_factor']}; only 1.0 is supported, so take another "
            "model"
        )
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(f"{where}: rope_type={kind}; expected default, linear, llama3 or yarn, so take another model")
    longest: Any = config.get("max_position_embeddings")
    original: Any = rope.get("original_max_position_embeddings") or longest
    try:
        factor = longest / original if rope.get("factor") is None else rope["factor"]
        options: dict[str, Any] = {}
        if kind == "llama3":
            options = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
        if kind == "yarn":
            names = ("beta_fast", "beta_slow", "mscale_all_dim")
            options = {name: float(rope[name]) for name in names if rope.get(name)}
            options["attention_factor"] = _attention_factor(rope, factor)
            if not rope.get("truncate", True):
                raise InputError(f"{where}: rope_type=yarn with truncate=false is not supported, so take another model")
        if kind != "linear":
            options["original_max_position_embeddings"] = int(original)
        numbers = {"rope_theta": theta, "factor": factor, **options}
        for name, value in numbers.items():
            if not 0 < float(value) < 2**31:
                raise InputError(f"{where}: rope_type={kind} has {name}={value}; expected a positive number")
        return theta, RopeScaling(kind, float(factor), **options)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{where}: rope_type={kind} lacks a number: {error}; add it") from error


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of config.json for both versions."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
        of_kind = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_fast", "beta_slow", "attention_factor"),
        }
        rope |= {name: getattr(scaling, name) for name in of_kind[scaling.kind]}
        if scaling.mscale_all_dim:
            rope["mscale_all_dim"] = scaling.mscale_all_dim
    old = {"rope_scaling": rope} if scaling is not None else {}
    return {"rope_theta": theta, "rope_parameters": {**rope, "rope_theta": theta}, **old}


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Peng et al. 2023, eq. 22: 0.1 ln(factor) + 1, unless the file says another; DeepSeek's has two weights for it."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)
