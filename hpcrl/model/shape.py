"""The architecture of a model in numbers: no torch, no ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcrl.runtime.exits import InputError

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding is stretched beyond the sequences that a model was first trained on; the names are those
    of config.json, the formulas in `hpcrl.model.rope`."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0  # of "llama3" and "yarn"
    low_freq_factor: float = 1.0  # of "llama3"
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of "yarn"
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on the embedding
    mscale_all_dim: float = 0.0  # of DeepSeek's "yarn": with it the softmax is sharper, see ModelShape.softmax_scale


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): each token has one latent vector, of
    which a projection makes the keys and values of all heads, and one rotated key that all heads share. Names of
    config.json."""

    q_lora_rank: int | None  # width of the queries' own latent; None: they come straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int  # width of a query and a key without rotary embedding
    qk_rope_head_dim: int  # and with it
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: RMSNorm, SwiGLU, RoPE, grouped-query or latent attention; layers may be mixtures of
    experts. With latent attention every head is a query group of its own, and `head_dim` the width of query and key."""

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
    dense_layers: tuple[int, ...] = ()  # of a model with experts, the layers without
    moe_topk: int = 2  # experts of each token
    moe_norm_topk_prob: bool = True  # their weights sum to 1, before moe_routed_scale
    moe_shared_ffn_hidden_size: int = 0  # width of the experts of every token, as one; 0: there are none
    moe_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_score_bias: bool = False  # the choice, not the weights, adds a constant to each expert's score
    moe_num_groups: int = 1  # of experts, of which a token chooses moe_topk_groups, then experts inside them
    moe_topk_groups: int = 1
    moe_group_best: int = 1  # how many of a group's experts, the best, make the group's score
    moe_routed_scale: float = 1.0  # on the experts' weights
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
            raise InputError(f"model.moe_topk={self.moe_topk} of model.num_experts={self.num_experts}; use fewer")

    @property
    def rope_dim(self) -> int:
        """Width of what the rotary embedding turns of a query and a key, the last of them."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Of the products of queries and keys: 1 / sqrt(head_dim), and DeepSeek's correction of yarn."""
        scale = self.head_dim**-0.5
        scaling = self.rope_scaling
        if self.mla is None or scaling is None or scaling.factor <= 1:
            return scale
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that are mixtures of experts."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe_layer(layer))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 whatever the layout, so that checkpoints do not depend on it."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
