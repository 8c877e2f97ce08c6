"""Reading and writing config.json of Hugging Face models. No torch.

An absent key has the default of the family's config class in `transformers`. Keys that change the shape of a weight
have no default, except those that published files leave out: there the check of the weights finds a default that does
not fit.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcrl.model.blocks.attention import HeadsBlock
from hpcrl.model.blocks.block import Layer
from hpcrl.model.families.family import (
    COMMON,
    FULL,
    SLIDING,
    Family,
    head_dim_of,
    layer_types_of,
    rope_from_hf,
    rope_of,
    rope_section,
    rope_to_hf,
)
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import MOST_LAYERS, VISION_TOKENS, vision_from_hf
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import read_json

CONFIG = "config.json"
MOST_BYTES = 1 << 22  # of it

FAMILIES: dict[str, Family] = {}
DEFAULTS: dict[str, Mapping[str, Any]] = {}


# Families whose attention chooses the tokens that a token attends to.
SPARSE = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "DeepSeek sparse attention (DSA)"),
    "deepseek_v4": "its compressed sparse attention (CSA)",
}


def register_family(model_type: str, family: Family, defaults: Mapping[str, Any] | None = None) -> None:
    """Add a family, whose directories have this model_type.

    Args:
        defaults: values of keys that config.json may lack, besides those that all families have.
    """
    if model_type in FAMILIES:
        raise ValueError(f"model_type={model_type} is registered already; choose another name")
    FAMILIES[model_type], DEFAULTS[model_type] = family, {**COMMON, **(defaults or {})}


def _register_all() -> None:
    """Add the families of each file in this folder that has some."""
    package = __name__.rpartition(".")[0]
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if f"{package}.{found.name}" != __name__:
            module = import_module(f"{package}.{found.name}")
            FAMILIES.update(getattr(module, "FAMILIES", {}))
            DEFAULTS.update(getattr(module, "DEFAULTS", {}))


_register_all()


def read_shape(folder: Path) -> ModelShape:
    """Return the shape described by config.json of `folder`."""
    return shape_from_hf(read_config(folder), str(folder / CONFIG))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of `folder`."""
    path = folder / CONFIG
    try:
        config = read_json(path, folder, most=MOST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); use a directory written by save_pretrained()") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is not an object; use a directory written by save_pretrained()")
    return config


# With a meaning of its own.
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "n_shared_experts")


def with_defaults(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return config.json, or its section on the text model, with the family's defaults for keys that are absent or null
    without a meaning."""
    given = {key: value for key, value in config.items() if value is not None or key in _MAY_BE_NULL}
    return {**DEFAULTS[family], **given}


def windows_of(config: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """Return the tokens that attention sees in each layer, None for all; empty if it sees all in all layers.

    Args:
        config: config.json with defaults.
    """
    own = {key: config[key] for key in DEFAULTS[family]}  # other families ignore these keys
    first, count = own.get("max_window_layers", 0), config["num_hidden_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputError(f"max_window_layers={first!r}; expected a whole number")
    window = own.get("sliding_window") if own.get("use_sliding_window", True) else None
    keys = {"num_hidden_layers": count, "layer_types": own.get("layer_types")}
    types = layer_types_of(keys, lambda layer: SLIDING if layer >= first else FULL, FULL, SLIDING)
    return tuple(window if kind == SLIDING else None for kind in types) if window and SLIDING in types else ()


def _window_keys(shape: ModelShape) -> dict[str, Any]:
    if not shape.windows:
        return {"sliding_window": None}
    found: dict[str, Any] = {"sliding_window": max(filter(None, shape.windows))}
    if "use_sliding_window" in DEFAULTS[shape.family]:
        found["use_sliding_window"] = True
    if "layer_types" in DEFAULTS[shape.family]:
        found["layer_types"] = [FULL if window is None else SLIDING for window in shape.windows]
        found["max_window_layers"] = next(layer for layer, window in enumerate(shape.windows) if window)
    return found


def shape_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape described by config.json. Raises InputError for an unsupported model."""
    family = FAMILIES.get(name := str(config.get("model_type", "")))
    try:
        if name in SPARSE:
            raise InputError(f"model_type={name}: {SPARSE[name]} is not supported; use another model")
        if family is None:
            raise InputError(f"model_type={name}; expected one of {', '.join(FAMILIES)}; use another model")
        return _shape(config, name, family)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except KeyError as error:
        assert family is not None
        raise InputError(
            f"{where} has no {error}; expected that of a {family.architecture}, as written by save_pretrained()"
        ) from error


def _shape(whole: Mapping[str, Any], name: str, family: Family) -> ModelShape:
    config = whole
    if family.tower is not None and isinstance(text := whole.get("text_config"), dict):
        # The text section that transformers 5 writes for qwen3_vl_moe says true, whatever the model has.
        sections = (whole,) if name == "qwen3_vl_moe" else (whole, text)
        config = text | {"tie_word_embeddings": any(section.get("tie_word_embeddings") for section in sections)}
    config = family.renamed(with_defaults(config, name))
    for key, expected in family.fixed.items():
        if (setting := config.get(key, expected)) != expected:
            raise InputError(f"{key}={setting}; only {expected} is supported; use another model")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if quantised is not None and (method is None or method != family.quantised):
        raise InputError(
            f"quantization_config={quantised}; quantised weights are not supported, so convert them to bfloat16 first"
        )
    _check_numbers(config)
    heads = config["num_attention_heads"]
    head_dim = head_dim_of(config)
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "init_std": config["initializer_range"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "family": name,
        "vision": None,
    }
    if family.tower is not None:
        fields["vision"] = vision_from_hf(whole, rope_section(config), rope_of(config, head_dim).dim)
    fields |= family.fields(config)
    if "blocks" in fields:
        if (vision := fields["vision"]) is not None:
            fields["blocks"] = tuple(_with_axes(layer, vision.rope_axes) for layer in fields["blocks"])
        hf_keys = {key: value for key, value in whole.items() if key != "quantization_config"}
        return ModelShape(**fields, hf_keys=json.dumps(hf_keys, sort_keys=True))
    theta, scaling = rope_from_hf(config)
    flat = {"windows": windows_of(config, name), "rope_theta": theta, "rope_scaling": scaling}
    return ModelShape(**{**flat, **fields})


def _with_axes(layer: Layer, axes: tuple[int, ...]) -> Layer:
    """Return the layer of a model with pictures."""
    attention = layer.attention
    if not isinstance(attention, HeadsBlock) or attention.rope is None:
        return layer
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, axes=axes)))


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "decoder_sparse_step"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "n_group", "topk_group"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval", "shared_expert_intermediate_size"),
)
_NUMBERS = (
    *("rms_norm_eps", "initializer_range", "routed_scaling_factor", "query_pre_attn_scalar"),
    *("swiglu_alpha", "swiglu_limit"),
)


# Numbers of things that are built one by one; the largest published models have a tenth of them.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace"), MOST_LAYERS),
    **dict.fromkeys((*_EXPERTS, "num_attention_heads", "num_key_value_heads"), 10_000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 10_000),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
}
MOST_IN_ALL = 500_000  # experts of all layers


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Validate the numbers, because the file is untrusted."""
    for key, most in MOST.items():
        value = config.get(key)
        if isinstance(value, int) and value > most:
            raise InputError(f"{key}={value}; expected at most {most}")
    for key in (*_SIZES, *_NUMBERS):
        kinds = (int,) if key in _SIZES else (int, float)
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**31):
            raise InputError(f"{key}={value!r}; expected a positive {'whole ' if key in _SIZES else ''}number")
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    if (layers := config["num_hidden_layers"]) * (experts or 0) > MOST_IN_ALL:
        raise InputError(f"{experts} experts in num_hidden_layers={layers}; expected at most {MOST_IN_ALL} in all")
    if experts is not None and (config.get("num_experts_per_tok") or 0) > experts:
        raise InputError(f"num_experts_per_tok={config['num_experts_per_tok']} of {experts} experts")
    dense = config.get("mlp_only_layers", ())
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise InputError(f"mlp_only_layers={dense!r}; expected numbers of layers")


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json of `shape`, for both transformers 4 (rope_theta) and 5 (rope_parameters); that of a family
    with blocks of its own as it was read."""
    if shape.hf_keys:
        return dict(json.loads(shape.hf_keys))
    family = FAMILIES[shape.family]
    named = {"model_type": shape.family, "architectures": [family.architecture]}
    text = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        **rope_to_hf(shape.rope_theta, shape.rope_scaling),
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": shape.init_std,
        "tie_word_embeddings": shape.tie_word_embeddings,
        **_window_keys(shape),
        **family.fixed,
        **family.keys(shape),
    }
    if (vision := shape.vision) is None:
        return named | text
    rope = text["rope_parameters"] | {
        "mrope_section": list(vision.mrope_section),
        **({"mrope_interleaved": True} if vision.mrope_interleaved else {}),
    }
    ropes = dict.fromkeys(text.keys() & {"rope_parameters", "rope_scaling"}, rope)
    text |= {"model_type": f"{shape.family}_text", **ropes}
    ids = {f"{name}_token_id": getattr(vision, f"{name}_token_id") for name in VISION_TOKENS}
    is_tied = {"tie_word_embeddings": shape.tie_word_embeddings}
    return named | {"text_config": text, "vision_config": dict(vision.tower), **ids, **is_tied}
