"""Small random models of every family, from `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
}
QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
# name -> (model_type, keys of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-6}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
        },
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", {"pad_token_id": 1, "no_rope_layers": [1, 1, 0, 1, 0]}),
    "smollm3-window": (
        "smollm3",
        {"pad_token_id": 1, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
    ),
    "ministral": (
        "ministral",
        {"sliding_window": 6, "layer_types": [*["full_attention", "sliding_attention"] * 2] + ["full_attention"]},
    ),
    "seed-oss": ("seed_oss", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 7, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}}},
    ),
    "apertus": ("apertus", {}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 8.0},
                "sliding_attention": {"rope_theta": 500.0},
            },
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {**DELTA, **QWEN_EXPERTS, "mlp_only_layers": [1], "full_attention_interval": 3},
    ),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "linear_value_head_dim": 6}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **QWEN_EXPERTS, "tie_word_embeddings": True}),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "mlp"),
                *("linear_attention", "linear_attention", "moe", "full_attention"),
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 4,
            "ssm_state_size": 10,
            "time_step_min": 0.4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "intermediate_size": 32,  # as wide as the hidden state, as in the published models
            "swiglu_limit": 0.3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 3.0,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}

STATES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h")
WINDOWS = ("mistral-window", "qwen2-window", "smollm3-window", "ministral", "olmo3", "gemma3", "gpt-oss")
EXPERTS = (
    *("qwen3-moe", "mixtral", "qwen3-next", "qwen3.5-moe", "glm4-moe", "minimax-m2"),
    *("gpt-oss", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "nemotron-h"),
)


def make_model(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """The same weights each time; norms and biases differ from 1 and 0. changes: of its config."""
    model_type, options = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases(model)]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def biases(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    """Of the experts' scores, which are saved and no parameters."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
