"""`Family`, and what several families share: names of parameters, defaults of keys, and blocks from keys. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.model.blocks.attention import Attention, Rope
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
    the model; an export copies them from the directory that the model was read from. tower: of a vision-language
    model, whose config.json has sections for text and vision, the prefix of the tower's tensors. quantised: the
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
    """Return the kind of each layer, one of `kinds`. config: with defaults. default: by the layer's number, if
    config.json does not name them."""
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
    """Return the attention that config.json, with defaults, describes. options: further fields."""
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or heads
    if heads % groups:
        raise InputError(f"num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return Attention(config["hidden_size"], rope, heads, groups, head_dim_of(config), **options)
