"""`Family`, and what several families share: names of parameters, defaults of keys, blocks and rotary embeddings from
keys. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.model.blocks.attention import Attention, Rope, RopeScaling
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

# Megatron's name -> Hugging Face's; "*" is the number of the layer, "#" that of the expert. Several names are stacked
# rows; those of linear_qkv are stacked by query group. "x[#]" and "x[#].T[0::2]" are parts of a tensor, see
# `hpcrl.model.hf_files`.
Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    fixed: keys that must have these values if they are present. fields: fields of ModelShape beyond Llama's, from
    config.json; with `blocks` the family's config.json is kept as it was read, and needs no `keys`. keys: keys of
    config.json beyond Llama's, from the shape. others: a pattern of tensors that the files may have besides those of
    the model; an export copies them from the directory that the model was read from. tower: the prefix of the tower's
    tensors in a vision-language model, whose config.json has sections for text and vision. quantised: the
    `quant_method` of files that are read; exports are not quantised. renamed: config.json, with defaults, with the
    names of keys that all families have, and without older names.
    """

    architecture: str
    names: Names
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    keys: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}
    tower: str | None = None
    others: str | None = None
    quantised: str | None = None
    renamed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config


MEGATRON, HF = "decoder.layers.*.", "model.layers.*."
LAYER: Names = {
    f"{MEGATRON}input_layernorm.weight": (f"{HF}input_layernorm.weight",),
    f"{MEGATRON}self_attention.linear_proj.weight": (f"{HF}self_attn.o_proj.weight",),
    f"{MEGATRON}pre_mlp_layernorm.weight": (f"{HF}post_attention_layernorm.weight",),
}
ATTENTION: Names = {
    **LAYER,
    f"{MEGATRON}self_attention.linear_qkv.weight": tuple(f"{HF}self_attn.{part}_proj.weight" for part in "qkv"),
}
QKV_BIAS: Names = {
    f"{MEGATRON}self_attention.linear_qkv.bias": tuple(f"{HF}self_attn.{part}_proj.bias" for part in "qkv"),
}
QK_NORM: Names = {
    f"{MEGATRON}self_attention.{head}_layernorm.weight": (f"{HF}self_attn.{head}_norm.weight",) for head in "qk"
}
OUTPUT_NORMS: Names = {
    f"{MEGATRON}post_attention_layernorm.weight": (f"{HF}post_attention_layernorm.weight",),
    f"{MEGATRON}post_mlp_layernorm.weight": (f"{HF}post_feedforward_layernorm.weight",),
}
MLP: Names = {
    f"{MEGATRON}mlp.linear_fc1.weight": (f"{HF}mlp.gate_proj.weight", f"{HF}mlp.up_proj.weight"),
    f"{MEGATRON}mlp.linear_fc2.weight": (f"{HF}mlp.down_proj.weight",),
}
ENDS: Names = {
    EMBEDDING: ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    OUTPUT_LAYER: ("lm_head.weight",),
}
LLAMA: Names = {**ENDS, **ATTENTION, **MLP}


def experts_mlp(router: str, expert: str, gate: str, up: str, down: str) -> Names:
    """Names in MoE layers, by the names of the family."""
    megatron = f"{MEGATRON}mlp.experts.local_experts.#."
    return {
        f"{MEGATRON}mlp.router.weight": (f"{HF}{router}.weight",),
        f"{megatron}linear_fc1.weight": tuple(f"{HF}{expert}.#.{part}.weight" for part in (gate, up)),
        f"{megatron}linear_fc2.weight": (f"{HF}{expert}.#.{down}.weight",),
    }


QWEN_MLP = experts_mlp("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_MLP = experts_mlp("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
LANGUAGE_MODEL = "model.language_model."  # prefix of the text model in a vision-language model


def in_language_model(names: Names) -> Names:
    return {
        name: tuple(
            f"{LANGUAGE_MODEL}{hf_name.removeprefix('model.')}" if hf_name.startswith("model.") else hf_name
            for hf_name in hf_names
        )
        for name, hf_names in names.items()
    }


PARTIAL = "partial_rotary_factor"
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
NO_BIAS = {"hidden_act": "silu", "attention_bias": False}
# Defaults of keys that are absent from config.json.
COMMON = {
    "num_key_value_heads": None,  # as many as num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def layer_types_of(config: Mapping[str, Any], default: Callable[[int], str], *kinds: str) -> list[str]:
    """Return the kind of each layer, one of `kinds`.

    Args:
        config: config.json with defaults.
        default: returns the kind of a layer, given its number, if config.json does not name the kinds.
    """
    count, given = config["num_hidden_layers"], config.get("layer_types")
    if given is None:
        return [default(layer) for layer in range(count)]
    if not isinstance(given, list) or {*map(str, given)} - {*kinds}:
        raise InputError(f"layer_types={given!r}; expected {' or '.join(kinds)} of each layer")
    if len(given) != count:
        raise InputError(f"layer_types has {len(given)} layers; expected num_hidden_layers={count}")
    return given


def positive(config: Mapping[str, Any], key: str) -> int:
    """Return a number that other families may have as 0, because they ignore it."""
    found = config[key]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**31:
        raise InputError(f"{key}={found!r}; expected a positive whole number")
    return found


def head_dim_of(config: Mapping[str, Any]) -> int:
    width: int = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    return width


def attention_of(config: Mapping[str, Any], rope: Rope | None, **options: Any) -> Attention:
    """Return the attention that config.json, with defaults, describes.

    Args:
        options: further fields of the attention.
    """
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or heads
    if heads % groups:
        raise InputError(f"num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return Attention(config["hidden_size"], rope, heads, groups, head_dim_of(config), **options)


def rope_section(config: Mapping[str, Any]) -> Any:
    """Return the keys of the rotary embedding. Those of transformers 4 have priority, as in transformers 5."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of a model that rotates whole heads. Raises InputError for any other kind.

    Args:
        config: config.json with defaults.
    """
    rope = rope_of(config, 1000)
    if rope.dim != 1000:
        raise InputError(f"{PARTIAL}={rope.dim / 1000}; only 1.0 is supported, so take another model")
    return rope.theta, rope.scaling


def rope_of(config: Mapping[str, Any], head_dim: int, section: Any = None) -> Rope:
    """Return the rotary embedding of heads of `head_dim` numbers. Raises InputError for an unsupported kind.

    Args:
        config: config.json with defaults.
        section: the keys of these layers; None: the section for all layers.
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

    Args:
        config: config.json with defaults; `rope_theta` and `rope_scaling` of transformers 4 are those of full
            attention.
        local_theta: the base of sliding attention, if config.json has no `rope_parameters` of it.
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
