"""Nemotron-H: Mamba-2, attention, MLPs and mixtures of experts, one of them in a layer. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcrl.model.blocks.block import Layer, half_layer
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.mamba import Mamba
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.families.deepseek import sigmoid_mixture
from hpcrl.model.families.family import MEGATRON, Family, Names, attention_of
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.runtime.exits import InputError

# Kinds of layers by their letters in hybrid_override_pattern, of published files.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}  # names of layers
_OLDER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": 0.001,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
}
_FIXED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    **dict.fromkeys(("moe_latent_size", "sliding_window"), None),
    **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"), False),
    **dict.fromkeys(("residual_in_fp32", "tie_word_embeddings"), False),
}
_HF = "backbone.layers.*."
_MIXER = f"{_HF}mixer."
_MAMBA, _EXPERT = f"{MEGATRON}self_attention.", f"{MEGATRON}mlp.experts.local_experts.#."
_NAMES: Names = {
    EMBEDDING: ("backbone.embeddings.weight",),
    "decoder.final_layernorm.weight": ("backbone.norm_f.weight",),
    OUTPUT_LAYER: ("lm_head.weight",),
    # A layer has one of the two.
    **{f"{MEGATRON}{norm}_layernorm.weight": (f"{_HF}norm.weight",) for norm in ("input", "pre_mlp")},
    # A tensor with all gates, then all x, B, C and dt.
    f"{_MAMBA}in_proj.weight": (f"{_MIXER}in_proj.weight",) * 5,
    **{f"{_MAMBA}conv1d.{name}": (f"{_MIXER}conv1d.{name}",) * 3 for name in ("weight", "bias")},
    **{f"{_MAMBA}{name}": (f"{_MIXER}{name}",) for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
    f"{_MAMBA}linear_qkv.weight": tuple(f"{_MIXER}{part}_proj.weight" for part in "qkv"),
    f"{_MAMBA}linear_proj.weight": (f"{_MIXER}o_proj.weight",),
    f"{MEGATRON}mlp.router.weight": (f"{_MIXER}gate.weight",),
    f"{MEGATRON}mlp.router.expert_bias": (f"{_MIXER}gate.e_score_correction_bias",),
    **{
        f"{megatron}{linear}.weight": (f"{_MIXER}{mlp}{projection}.weight",)
        for megatron, mlp in (
            (f"{MEGATRON}mlp.", ""),
            (f"{MEGATRON}mlp.shared_experts.", "shared_experts."),
            (_EXPERT, "experts.#."),
        )
        for linear, projection in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
    },
}


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    older = {new: config[key] for key, new in _OLDER_KEYS.items() if key in config}
    types = _types_of(config)
    eps = config["layer_norm_epsilon"]
    return {**config, **older, "layers_block_type": types, "num_hidden_layers": len(types), "rms_norm_eps": eps}


def _types_of(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer."""
    kinds, pattern = [*_LETTERS.values()], config.get("hybrid_override_pattern")
    if (types := config.get("layers_block_type")) is None and pattern is not None:
        if not isinstance(pattern, str) or {*pattern} - {*_LETTERS}:
            raise InputError(f"hybrid_override_pattern={pattern!r}; expected letters {' '.join(_LETTERS)} of layers")
        return [_LETTERS[letter] for letter in pattern]
    if types is None:
        raise KeyError("layers_block_type")
    types = [_OLDER.get(str(kind), str(kind)) for kind in types] if isinstance(types, list) else []
    if not types or {*types} - {*kinds}:
        raise InputError(
            f"layers_block_type={config['layers_block_type']!r}; expected {', '.join(kinds)} of each layer"
        )
    return types


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, norms = dict[str, Layer](), Norms()
    for kind in dict.fromkeys(config["layers_block_type"]):
        if kind == "linear_attention":
            layers[kind] = half_layer(_mamba(config), "attention", norms)
        elif kind == "full_attention":
            layers[kind] = half_layer(attention_of(config, None), "attention", norms)
        elif kind == "mlp":
            mlp = FeedForward(config["hidden_size"], config["intermediate_size"], "relu2", is_gated=False)
            layers[kind] = half_layer(mlp, "mlp", norms)
        else:
            layers[kind] = half_layer(_mixture(config), "mlp", norms)
    return {"blocks": tuple(layers[kind] for kind in config["layers_block_type"])}


def _mamba(config: Mapping[str, Any]) -> Mamba:
    """Return Mamba-2. As in `transformers`, the step of time is at least time_step_min, and has no other limit."""
    keys = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    for key in keys:
        if isinstance(config[key], bool) or not isinstance(config[key], int) or not 0 < config[key] < 2**16:
            raise InputError(f"{key}={config[key]!r}; expected a positive whole number")
    heads, width, groups, state, conv = (config[key] for key in keys)
    if heads % groups:
        raise InputError(f"n_groups={groups} does not divide mamba_num_heads={heads}")
    if not isinstance(least := config["time_step_min"], int | float):
        raise InputError(f"time_step_min={least!r}; expected a number")
    has_bias = bool(config["use_conv_bias"])
    return Mamba(config["hidden_size"], heads, width, groups, state, conv, has_bias, float(least))


def _mixture(config: Mapping[str, Any]) -> MixtureOfExperts:
    """DeepSeek-V3's with other experts; there is one shared expert, whatever `n_shared_experts` says."""
    shared = config["moe_shared_expert_intermediate_size"]
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 < shared < 2**31:
        raise InputError(f"moe_shared_expert_intermediate_size={shared!r}; expected a positive whole number")
    mixture = sigmoid_mixture({**config, "n_shared_experts": 0})
    return replace(mixture, shared_ffn_hidden_size=shared, is_gated=False)


FAMILIES = {
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        _NAMES,
        _FIXED,
        _fields,
        others=r"^mtp\.",  # layers that predict further tokens
        renamed=_renamed,
    )
}
