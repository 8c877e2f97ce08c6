"""The architecture of a model in numbers, and its low-rank adapters. No torch, no ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcrl.runtime.exits import InputError

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding is extended beyond the sequence length of the first training; names are those of
    config.json, formulas are in `hpcrl.model.rope`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0  # of "llama3" and "yarn"
    low_freq_factor: float = 1.0  # of "llama3"
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of "yarn"
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # of the embedding
    mscale_all_dim: float = 0.0  # of DeepSeek's "yarn": sharpens the softmax, see ModelShape.softmax_scale


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): each token has one latent vector, from
    which a projection computes keys and values of all heads, and one rotated key shared by all heads. Names of
    config.json."""

    q_lora_rank: int | None  # width of the queries' own latent; None: queries are computed from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int  # width of a query and a key without rotary embedding
    qk_rope_head_dim: int  # and with rotary embedding
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: RMSNorm, SwiGLU, RoPE, grouped-query or latent attention, dense or MoE layers. With latent
    attention every head is its own query group, and `head_dim` is the width of query and key."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    family: str = "llama"  # the model_type of its Hugging Face directories
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head
    num_experts: int = 0  # 0: no layer is a mixture of experts
    moe_ffn_hidden_size: int = 0  # width of one expert
    dense_layers: tuple[int, ...] = ()  # the layers without experts in a model with experts
    moe_topk: int = 2  # experts of each token
    moe_norm_topk_prob: bool = True  # their weights sum to 1, before moe_routed_scale
    moe_shared_ffn_hidden_size: int = 0  # total width of the shared experts; 0: none
    moe_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_score_bias: bool = False  # the choice, not the weights, uses a bias per expert
    moe_num_groups: int = 1  # groups of experts; a token chooses moe_topk_groups, then experts inside them
    moe_topk_groups: int = 1
    moe_group_best: int = 1  # a group's score is the sum of so many of its best scores
    moe_routed_scale: float = 1.0  # factor of the experts' weights
    mla: LatentAttention | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise InputError(
                f"model.num_query_groups={self.num_query_groups} does not divide "
                f"model.num_attention_heads={self.num_attention_heads}; use a divisor of it"
            )
        if self.rope_dim % 2:
            raise InputError(f"model.head_dim={self.rope_dim} is odd; rotary embeddings need an even width")
        if self.num_experts and not self.moe_ffn_hidden_size:
            raise InputError(f"model.num_experts={self.num_experts} needs model.moe_ffn_hidden_size; set it")
        if self.num_experts and self.moe_topk > self.num_experts:
            raise InputError(
                f"model.moe_topk={self.moe_topk} is more than model.num_experts={self.num_experts}; use fewer"
            )

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of queries and keys, the last part."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys: 1 / sqrt(head_dim), and DeepSeek's correction of yarn."""
        scale = self.head_dim**-0.5
        scaling = self.rope_scaling
        if self.mla is None or scaling is None or scaling.factor <= 1:
            return scale
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The MoE layers."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe_layer(layer))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 under any layout, so that checkpoints do not depend on it."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
