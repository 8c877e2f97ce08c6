"""Families of Hugging Face models: config.json, and their names of Megatron's parameters. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.model.families.defaults import window_of, with_defaults
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.model.shape import LatentAttention, ModelShape, RopeScaling
from hpcrl.model.vision import MOST_LAYERS, VISION_TOKENS, vision_from_hf
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import read_json

CONFIG = "config.json"
MOST_BYTES = 1 << 22  # of it


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


Rope = tuple[float, RopeScaling | None]


def rope_section(config: Mapping[str, Any]) -> Any:
    """The keys of the rotary embedding: those of transformers 4 have priority, as in transformers 5."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_from_hf(config: Mapping[str, Any]) -> Rope:
    """Return base and scaling. Raises InputError for an unsupported kind. config: with defaults."""
    rope = rope_section(config)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InputError(f"rope_parameters={rope!r}; expected one rotary embedding for all layers")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise InputError(f"partial_rotary_factor={partial}; only 1.0 is supported, so take another model")
    if kind in ("default", "mrope"):  # positions of pictures are in `hpcrl.model.blocks.rope`
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(f"rope_type={kind}; expected default, linear, llama3 or yarn; use another model")
    longest: Any = config["max_position_embeddings"]
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
            if not rope.get("truncate", True):
                raise InputError("rope_type=yarn with truncate=false is not supported; use another model")
        if kind != "linear":
            options["original_max_position_embeddings"] = int(original)
        numbers = {"rope_theta": theta, "factor": factor, **options}
        for name, value in numbers.items():
            if not 0 < float(value) < 2**31:
                raise InputError(f"rope_type={kind} has {name}={value}; expected a positive number")
        return theta, RopeScaling(kind, float(factor), **options)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"rope_type={kind} lacks a number: {error}; add it") from error


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
    old = {"rope_scaling": rope} if scaling is not None else {}
    return {"rope_theta": theta, "rope_parameters": {**rope, "rope_theta": theta}, **old}


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


# Keys that must have these values if they are present.
_FIXED = {"moe_layer_freq": 1}
V2_FIXED = _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False}
V3_FIXED = _FIXED | {
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}


def v2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(f"topk_method={method}; expected greedy or group_limited_greedy; use another model")
    groups = _groups(config) if method == "group_limited_greedy" else {}
    return {**_fields(config), **groups, "moe_norm_topk_prob": False}


def v3_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_fields(config),
        **_groups(config),
        "moe_group_best": 2,
        "moe_norm_topk_prob": True,
        "moe_score_function": "sigmoid",
        "moe_score_bias": True,
    }


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, dense, width = config["num_hidden_layers"], config["first_k_dense_replace"], "moe_intermediate_size"
    if not isinstance(dense, int) or not 0 <= dense < layers:
        raise InputError(f"first_k_dense_replace={dense!r} of num_hidden_layers={layers}; expected less, 0 at least")
    mla = LatentAttention(
        q_lora_rank=config["q_lora_rank"],
        **{name: config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    )
    return {
        "mla": mla,
        "num_query_groups": config["num_attention_heads"],
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config[width],
        "moe_shared_ffn_hidden_size": (config["n_shared_experts"] or 0) * config[width],
        "moe_topk": config["num_experts_per_tok"],
        "moe_routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": tuple(range(dense)),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, int]:
    experts, groups, chosen = (config[key] for key in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups or chosen > groups or config["num_experts_per_tok"] > chosen * (experts // groups):
        raise InputError(
            f"num_experts_per_tok={config['num_experts_per_tok']} in topk_group={chosen} of n_group={groups} groups of "
            f"n_routed_experts={experts}; expected groups of one size, with enough experts"
        )
    return {"moe_num_groups": groups, "moe_topk_groups": chosen}


def v2_keys(shape: ModelShape) -> dict[str, Any]:
    return {**_keys(shape), "topk_method": "greedy" if shape.moe_num_groups == 1 else "group_limited_greedy"}


def v3_keys(shape: ModelShape) -> dict[str, Any]:
    return {**_keys(shape), "num_nextn_predict_layers": 0}


def _keys(shape: ModelShape) -> dict[str, Any]:
    assert shape.mla is not None
    return {
        **asdict(shape.mla),
        "head_dim": shape.rope_dim,  # transformers takes the rotary embedding's width from it
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": shape.moe_shared_ffn_hidden_size // shape.moe_ffn_hidden_size,
        "moe_intermediate_size": shape.moe_ffn_hidden_size,
        "num_experts_per_tok": shape.moe_topk,
        "norm_topk_prob": shape.moe_norm_topk_prob,
        "routed_scaling_factor": shape.moe_routed_scale,
        "first_k_dense_replace": len(shape.dense_layers),
        "n_group": shape.moe_num_groups,
        "topk_group": shape.moe_topk_groups,
    }


# Megatron's name -> Hugging Face's; "*" is the number of the layer, "#" that of the expert. Several names are stacked
# rows; those of linear_qkv are stacked by query group. "x[#]" is one matrix of a tensor, see `hpcrl.model.hf_files`.
Names = Mapping[str, tuple[str, ...]]

_MEGATRON, _HF = "decoder.layers.*.", "model.layers.*."
_LAYER: Names = {
    f"{_MEGATRON}input_layernorm.weight": (f"{_HF}input_layernorm.weight",),
    f"{_MEGATRON}self_attention.linear_proj.weight": (f"{_HF}self_attn.o_proj.weight",),
    f"{_MEGATRON}pre_mlp_layernorm.weight": (f"{_HF}post_attention_layernorm.weight",),
}
_ATTENTION: Names = {
    **_LAYER,
    f"{_MEGATRON}self_attention.linear_qkv.weight": tuple(f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"),
}
_LATENT_ATTENTION: Names = {
    **_LAYER,
    **{
        f"{_MEGATRON}self_attention.{megatron}.weight": (f"{_HF}self_attn.{hf}.weight",)
        for megatron, hf in {
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
    f"{_MEGATRON}self_attention.linear_qkv.bias": tuple(f"{_HF}self_attn.{part}_proj.bias" for part in "qkv"),
}
_QK_NORM: Names = {
    f"{_MEGATRON}self_attention.{head}_layernorm.weight": (f"{_HF}self_attn.{head}_norm.weight",) for head in "qk"
}
_MLP: Names = {
    f"{_MEGATRON}mlp.linear_fc1.weight": (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"),
    f"{_MEGATRON}mlp.linear_fc2.weight": (f"{_HF}mlp.down_proj.weight",),
}
_ENDS: Names = {
    EMBEDDING: ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    OUTPUT_LAYER: ("lm_head.weight",),
}
_LLAMA: Names = {**_ENDS, **_ATTENTION, **_MLP}


def _experts(router: str, expert: str, gate: str, up: str, down: str) -> Names:
    """Names in MoE layers, by the names of the family."""
    megatron = f"{_MEGATRON}mlp.experts.local_experts.#."
    return {
        f"{_MEGATRON}mlp.router.weight": (f"{_HF}{router}.weight",),
        f"{megatron}linear_fc1.weight": tuple(f"{_HF}{expert}.#.{part}.weight" for part in (gate, up)),
        f"{megatron}linear_fc2.weight": (f"{_HF}{expert}.#.{down}.weight",),
    }


_STACKED_MLP: Names = {
    f"{_MEGATRON}mlp.router.weight": (f"{_HF}mlp.gate.weight",),
    f"{_MEGATRON}mlp.experts.local_experts.#.linear_fc1.weight": (f"{_HF}mlp.experts.gate_up_proj[#]",),
    f"{_MEGATRON}mlp.experts.local_experts.#.linear_fc2.weight": (f"{_HF}mlp.experts.down_proj[#]",),
}
_MIXTRAL_MLP = _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
_QWEN_MLP = _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERTS: Names = {
    f"{_MEGATRON}mlp.router.expert_bias": (f"{_HF}mlp.gate.e_score_correction_bias",),
    f"{_MEGATRON}mlp.shared_experts.linear_fc1.weight": tuple(
        f"{_HF}mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    f"{_MEGATRON}mlp.shared_experts.linear_fc2.weight": (f"{_HF}mlp.shared_experts.down_proj.weight",),
}
_DEEPSEEK: Names = {**_ENDS, **_LATENT_ATTENTION, **_MLP, **_QWEN_MLP, **_SHARED_EXPERTS}


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    fixed: keys that must have these values if they are present. fields: fields of ModelShape beyond Llama's, from
    config.json. keys: keys of config.json beyond Llama's, from the shape. tower: of a vision-language model, whose
    config.json has sections for text and vision, the prefix of the tower's tensors.
    """

    architecture: str
    names: Names
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    keys: Callable[[ModelShape], dict[str, Any]] = lambda shape: {}
    tower: str | None = None


def _mixtral_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": config["num_local_experts"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
    }


def _qwen_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    layers = range(config["num_hidden_layers"])
    return {
        "qk_norm": True,
        "num_experts": config.get("num_local_experts") or config["num_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_topk": config["num_experts_per_tok"],
        "moe_norm_topk_prob": config["norm_topk_prob"],
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    }


def _qwen3_vl_moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
    if hidden in (ffn, 2 * ffn):
        raise InputError(
            f"moe_intermediate_size={ffn} is hidden_size={hidden} or half of it, so the files do not show whether the "
            "experts' matrices are transposed; use another model"
        )
    return _qwen_moe_fields({**config, "norm_topk_prob": True})


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


LANGUAGE_MODEL = "model.language_model."  # prefix of the text model in a vision-language model


def _in_language_model(names: Names) -> Names:
    return {
        name: tuple(
            f"{LANGUAGE_MODEL}{hf_name.removeprefix('model.')}" if hf_name.startswith("model.") else hf_name
            for hf_name in hf_names
        )
        for name, hf_names in names.items()
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
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {**_LLAMA, **_QKV_BIAS},
        {"hidden_act": "silu"},
        lambda _: {"qkv_bias": True},
        tower="visual.",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        _in_language_model({**_LLAMA, **_QK_NORM}),
        _NO_BIAS,
        lambda _: {"qk_norm": True},
        tower="model.visual.",
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        _in_language_model({**_LLAMA, **_QK_NORM, **_STACKED_MLP}),
        _NO_BIAS | {"norm_topk_prob": True},
        _qwen3_vl_moe_fields,
        _qwen_moe_keys,
        tower="model.visual.",
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _DEEPSEEK, _NO_BIAS | V2_FIXED, v2_fields, v2_keys),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK, _NO_BIAS | V3_FIXED, v3_fields, v3_keys),
}


def family_of(shape: ModelShape) -> Family:
    return FAMILIES[shape.family]


def shape_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape described by config.json. Raises InputError for an unsupported model."""
    family = FAMILIES.get(name := str(config.get("model_type", "")))
    try:
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
    config = with_defaults(config, name)
    for key, expected in family.fixed.items():
        if (found := config.get(key, expected)) != expected:
            raise InputError(f"{key}={found}; only {expected} is supported; use another model")
    if (quantised := config.get("quantization_config")) is not None:
        raise InputError(
            f"quantization_config={quantised}; quantised weights are not supported, so convert them to bfloat16 first"
        )
    _check_numbers(config)
    theta, scaling = rope_from_hf(config)
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "window": window_of(config, name),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config["rms_norm_eps"],
        "init_std": config["initializer_range"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "family": name,
        "vision": None if family.tower is None else vision_from_hf(whole, rope_section(config), head_dim),
    }
    return ModelShape(**{**fields, **family.fields(config)})


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "decoder_sparse_step"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "n_group", "topk_group"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


# Numbers of things that are built one by one; the largest published models have a tenth of them.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace"), MOST_LAYERS),
    **dict.fromkeys((*_EXPERTS, "num_attention_heads", "num_key_value_heads"), 10_000),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
}
MOST_IN_ALL = 500_000  # experts of all layers


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Validate the numbers, because the file is untrusted."""
    for key, most in MOST.items():
        found = config.get(key)
        if isinstance(found, int) and found > most:
            raise InputError(f"{key}={found}; expected at most {most}")
    for key in (*_SIZES, "rms_norm_eps", "initializer_range", "routed_scaling_factor"):
        kinds = (int,) if key in _SIZES else (int, float)
        found = config.get(key)
        if found is not None and (isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < 2**31):
            raise InputError(f"{key}={found!r}; expected a positive {'whole ' if key in _SIZES else ''}number")
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    if (layers := config["num_hidden_layers"]) * (experts or 0) > MOST_IN_ALL:
        raise InputError(f"{experts} experts in num_hidden_layers={layers}; expected at most {MOST_IN_ALL} in all")
    if experts is not None and (config.get("num_experts_per_tok") or 0) > experts:
        raise InputError(f"num_experts_per_tok={config['num_experts_per_tok']} of {experts} experts")
    dense = config.get("mlp_only_layers", ())
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise InputError(f"mlp_only_layers={dense!r}; expected numbers of layers")


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json of `shape`, for both transformers 4 (rope_theta) and 5 (rope_parameters)."""
    family = family_of(shape)
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
        "sliding_window": None,
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
