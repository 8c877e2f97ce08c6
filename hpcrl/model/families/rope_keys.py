"""Keys of config.json for rotary embeddings. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcrl.model.blocks.attention import Rope, RopeScaling
from hpcrl.runtime.exits import InputError

PARTIAL = "partial_rotary_factor"
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types


def rope_section(config: Mapping[str, Any]) -> Any:
    """Return the keys of the rotary embedding. Those of transformers 4 have priority, as in transformers 5."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of a model that rotates whole heads. Raises InputError for any other kind. config: with
    defaults."""
    rope = rope_of(config, 1000)
    if rope.dim != 1000:
        raise InputError(f"{PARTIAL}={rope.dim / 1000}; only 1.0 is supported, so take another model")
    return rope.theta, rope.scaling


def rope_of(config: Mapping[str, Any], head_dim: int, section: Any = None) -> Rope:
    """Return the rotary embedding of heads of `head_dim` numbers. Raises InputError for an unsupported kind.

    config: with defaults. section: the keys of these layers; None: those of all layers.
    """
    rope = rope_section(config) if section is None else section
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InputError(f"rope_parameters={rope!r}; expected one rotary embedding for all layers")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 2**31:
        raise InputError(f"rope_theta={theta!r}; expected a positive number")
    partial = rope.get(PARTIAL, config.get(PARTIAL, 1.0))
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise InputError(f"{PARTIAL}={partial!r}; expected a number above 0 and up to 1")
    dim = int(head_dim * partial)
    if dim <= 0 or dim % 2:
        raise InputError(f"{PARTIAL}={partial} of heads of {head_dim} rotates {dim} numbers; expected an even number")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):  # positions of pictures are in `hpcrl.model.blocks.rope_angles`
        return Rope(dim, theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(f"rope_type={kind}; expected default, linear, llama3 or yarn; use another model")
    return Rope(dim, theta, _scaling(kind, theta, rope, config["max_position_embeddings"]))


def ropes_of(config: Mapping[str, Any], head_dim: int, local_theta: Any) -> dict[str, Rope]:
    """Return the rotary embeddings of full and of sliding attention, in models that have one for each.

    config: with defaults; `rope_theta` and `rope_scaling` of transformers 4 are those of full attention. local_theta:
    the base of sliding attention, if config.json has no `rope_parameters` of it.
    """
    given = config.get("rope_parameters") or {}
    if (
        not isinstance(given, dict)
        or not all(isinstance(of, dict) for of in given.values())
        or {*given} - {FULL, SLIDING}
    ):
        raise InputError(f"rope_parameters={given!r}; expected those of {FULL} and {SLIDING}")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise InputError(f"rope_scaling={scaling!r}; expected the keys of {FULL}")
    sections = {
        FULL: {"rope_theta": config["rope_theta"], **(given.get(FULL) or {}), **scaling},
        SLIDING: {"rope_theta": local_theta, **(given.get(SLIDING) or {})},
    }
    return {kind: rope_of(config, head_dim, section) for kind, section in sections.items()}


def _scaling(kind: Any, theta: Any, rope: Mapping[str, Any], longest: Any) -> RopeScaling:
    given: Any = rope.get("original_max_position_embeddings")
    original = given or longest
    try:
        factor = longest / original if kind == "yarn" and given and "factor" not in rope else rope["factor"]
        options: dict[str, Any] = {}
        if kind == "llama3":
            options = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
        if kind == "yarn":
            names = ("beta_fast", "beta_slow", "mscale_all_dim")
            options = {name: float(rope[name]) for name in names if rope.get(name)}
            options["attention_factor"] = _attention_factor(rope, factor)
        if kind != "linear":
            options["original_max_position_embeddings"] = int(original)
        numbers = {"rope_theta": theta, "factor": factor, **options}
        for name, value in numbers.items():
            if not 0 < float(value) < 2**31:
                raise InputError(f"rope_type={kind} has {name}={value}; expected a positive number")
        return RopeScaling(kind, float(factor), **options, truncate=bool(rope.get("truncate", True)))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"rope_type={kind} lacks a number: {error}; add it") from error


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Peng et al. 2023, eq. 22: 0.1 ln(factor) + 1, unless the file has another; DeepSeek's files have two weights for
    it."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys of config.json for both versions."""
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
        if not scaling.truncate:
            rope["truncate"] = False
    old = {"rope_scaling": rope} if scaling is not None else {}
    return {"rope_theta": theta, "rope_parameters": {**rope, "rope_theta": theta}, **old}
