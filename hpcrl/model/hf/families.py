"""Families of Hugging Face models: what config.json says of them, and their names for our parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.model.hf import deepseek
from hpcrl.model.hf.rope_scaling import rope_from_hf, rope_to_hf
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

# Ours -> theirs; "*" is the number of the layer, "#" that of the expert. Several are rows one below the other, those of
# linear_qkv by query group.
Names = Mapping[str, tuple[str, ...]]

_OURS, _THEIRS = "decoder.layers.*.", "model.layers.*."
_LAYER: Names = {
    f"{_OURS}input_layernorm.weight": (f"{_THEIRS}input_layernorm.weight",),
    f"{_OURS}self_attention.linear_proj.weight": (f"{_THEIRS}self_attn.o_proj.weight",),
    f"{_OURS}pre_mlp_layernorm.weight": (f"{_THEIRS}post_attention_layernorm.weight",),
}
_ATTENTION: Names = {
    **_LAYER,
    f"{_OURS}self_attention.linear_qkv.weight": tuple(f"{_THEIRS}self_attn.{part}_proj.weight" for part in "qkv"),
}
_LATENT_ATTENTION: Names = {
    **_LAYER,
    **{
        f"{_OURS}self_attention.{ours}.weight": (f"{_THEIRS}self_attn.{theirs}.weight",)
        for ours, theirs in {
            "linear_q_proj": "q_proj",
            "linear_q_down_proj": "q_a_proj",
            "q_layernorm": "q_a_layernorm",
            "linear_q_up_proj": "q_b_proj",
            "linear_kv_down_proj": "kv_a_proj_with_mqa",
            "kv_layernorm": "kv_a_layernorm",
            "linear_kv_up_proj": "kv_b_proj",
        }.items()
    },
}
_QKV_BIAS: Names = {
    f"{_OURS}self_attention.linear_qkv.bias": tuple(f"{_THEIRS}self_attn.{part}_proj.bias" for part in "qkv"),
}
_QK_NORM: Names = {
    f"{_OURS}self_attention.{head}_layernorm.weight": (f"{_THEIRS}self_attn.{head}_norm.weight",) for head in "qk"
}
_MLP: Names = {
    f"{_OURS}mlp.linear_fc1.weight": (f"{_THEIRS}mlp.gate_proj.weight", f"{_THEIRS}mlp.up_proj.weight"),
    f"{_OURS}mlp.linear_fc2.weight": (f"{_THEIRS}mlp.down_proj.weight",),
}
_ENDS: Names = {
    EMBEDDING: ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    OUTPUT_LAYER: ("lm_head.weight",),
}
_LLAMA: Names = {**_ENDS, **_ATTENTION, **_MLP}


def _experts(router: str, expert: str, gate: str, up: str, down: str) -> Names:
    """Of layers that are mixtures, by the names of the family."""
    ours = f"{_OURS}mlp.experts.local_experts.#."
    return {
        f"{_OURS}mlp.router.weight": (f"{_THEIRS}{router}.weight",),
        f"{ours}linear_fc1.weight": tuple(f"{_THEIRS}{expert}.#.{part}.weight" for part in (gate, up)),
        f"{ours}linear_fc2.weight": (f"{_THEIRS}{expert}.#.{down}.weight",),
    }


_MIXTRAL_MLP = _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
_QWEN_MLP = _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERTS: Names = {
    f"{_OURS}mlp.router.expert_bias": (f"{_THEIRS}mlp.gate.e_score_correction_bias",),
    f"{_OURS}mlp.shared_experts.linear_fc1.weight": tuple(
        f"{_THEIRS}mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    f"{_OURS}mlp.shared_experts.linear_fc2.weight": (f"{_THEIRS}mlp.shared_experts.down_proj.weight",),
}
_DEEPSEEK: Names = {**_ENDS, **_LATENT_ATTENTION, **_MLP, **_QWEN_MLP, **_SHARED_EXPERTS}


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    fixed: keys that must have these values, in so far as they are there. fields: of ModelShape, beyond Llama's, by
    config.json. keys: of config.json, beyond Llama's, by the shape.
    """

    architecture: str
    names: Names
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    keys: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": config["num_local_experts"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
    }


def _qwen_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return {
        "qk_norm": True,
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
        "moe_norm_topk_prob": config.get("norm_topk_prob", False),
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    }


def _mixtral_keys(shape: ModelShape) -> dict[str, Any]:
    return {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.moe_topk}


def _qwen_moe_keys(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.moe_topk,
        "moe_intermediate_size": shape.moe_ffn_hidden_size,
        "norm_topk_prob": shape.moe_norm_topk_prob,
        "mlp_only_layers": list(shape.dense_layers),
        "decoder_sparse_step": 1,
    }


_NO_BIAS = {"hidden_act": "silu", "attention_bias": False}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA, _NO_BIAS | {"mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", _LLAMA, _NO_BIAS),
    "qwen2": Family("Qwen2ForCausalLM", {**_LLAMA, **_QKV_BIAS}, {"hidden_act": "silu"}, lambda _: {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {**_LLAMA, **_QK_NORM}, _NO_BIAS, lambda _: {"qk_norm": True}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**_LLAMA, **_QK_NORM, **_QWEN_MLP}, _NO_BIAS, _qwen_moe_fields, _qwen_moe_keys
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {**_ENDS, **_ATTENTION, **_MIXTRAL_MLP}, _NO_BIAS, _mixtral_fields, _mixtral_keys
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", _DEEPSEEK, _NO_BIAS | deepseek.V2_FIXED, deepseek.v2_fields, deepseek.v2_keys
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", _DEEPSEEK, _NO_BIAS | deepseek.V3_FIXED, deepseek.v3_fields, deepseek.v3_keys
    ),
}


def family_of(shape: ModelShape) -> Family:
    return FAMILIES[shape.family]


def shape_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that config.json describes; raises InputError for what our model does not compute."""
    family = FAMILIES.get(name := str(config.get("model_type", "")))
    if family is None:
        raise InputError(f"{where}: model_type={name}; expected one of {', '.join(FAMILIES)}, so take another model")
    for key, expected in family.fixed.items():
        if (found := config.get(key, expected)) != expected:
            raise InputError(f"{where}: {key}={found}; only {expected} is supported, so take another model")

    if (quantised := config.get("quantization_config")) is not None:
        raise InputError(
            f"{where}: quantization_config={quantised}; quantised weights are not supported, so convert them to "
            "bfloat16 first"
        )
    theta, scaling = rope_from_hf(config, where)
    _check_numbers(config, where)
    config = {key: value for key, value in config.items() if value is not None}
    try:
        heads = config["num_attention_heads"]
        longest = config.get("max_position_embeddings", 2048)
        fields = {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "vocab_size": config["vocab_size"],
            # within the window, attention in a window is attention to all
            "max_position_embeddings": min(longest, _window(config) or longest),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_norm_eps": config["rms_norm_eps"],
            "init_std": config.get("initializer_range", 0.02),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "family": name,
        }
        return ModelShape(**{**fields, **family.fields(config)})
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except KeyError as error:
        raise InputError(
            f"{where} has no {error}; expected a {family.architecture}'s, as save_pretrained() writes it"
        ) from error


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "decoder_sparse_step"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "n_group", "topk_group"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


def _check_numbers(config: Mapping[str, Any], where: str) -> None:
    """The file may come from anywhere."""
    for key in (*_SIZES, "rms_norm_eps", "initializer_range", "routed_scaling_factor"):
        kinds = (int,) if key in _SIZES else (int, float)
        found = config.get(key)
        if found is not None and (isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < 2**31):
            raise InputError(f"{where}: {key}={found!r}; expected a positive {'whole ' if key in _SIZES else ''}number")
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts is not None and (config.get("num_experts_per_tok") or 0) > experts:
        raise InputError(f"{where}: num_experts_per_tok={config['num_experts_per_tok']} of {experts} experts")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise InputError(f"{where}: mlp_only_layers={dense!r}; expected numbers of layers")


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """config.json of `shape`, for transformers 4 (rope_theta) and 5 (rope_parameters) alike."""
    family = family_of(shape)
    return {
        "model_type": shape.family,
        "architectures": [family.architecture],
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
        "sliding_window": None,
        **family.fixed,
        **family.keys(shape),
    }


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that attention looks back, None for all of them."""
    types = config.get("layer_types") or ["sliding_attention"]
    uses = config.get("use_sliding_window", True) and set(types) != {"full_attention"}
    return config.get("sliding_window") if uses else None
