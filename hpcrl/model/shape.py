"""The architecture of a model in numbers: no torch, no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.launch.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import ModelConfig

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: RMSNorm, SwiGLU, grouped-query attention, RoPE, no biases; layers may be mixtures of
    experts, which so far only the parameter table and the refit planner know."""

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
    num_experts: int = 0  # 0: no layer is a mixture of experts
    moe_ffn_hidden_size: int = 0  # width of one expert
    moe_layer_freq: int = 1  # layers 0, freq, 2 * freq, ... are mixtures; the others are dense

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise InputError(
                f"model.num_query_groups={self.num_query_groups} does not divide "
                f"model.num_attention_heads={self.num_attention_heads}; use a divisor of it"
            )
        if self.head_dim % 2:
            raise InputError(f"model.head_dim={self.head_dim} is odd; rotary embeddings need an even width")
        if self.num_experts and not self.moe_ffn_hidden_size:
            raise InputError(f"model.num_experts={self.num_experts} needs model.moe_ffn_hidden_size; set it")

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer % self.moe_layer_freq == 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 whatever the layout, so that checkpoints do not depend on it."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def from_config(cls, model: ModelConfig, vocab_size: int) -> ModelShape:
        """The shape that `model:` describes; `vocab_size` is the tokenizer's, used where the YAML gives none."""
        vocab = model.vocab_size or vocab_size
        if vocab < vocab_size:
            raise InputError(
                f"model.vocab_size={vocab} is below the tokenizer's {vocab_size}; leave it null or raise it"
            )
        head_dim = model.head_dim
        if head_dim is None:
            if model.hidden_size % model.num_attention_heads:
                raise InputError(
                    f"model.num_attention_heads={model.num_attention_heads} does not divide "
                    f"model.hidden_size={model.hidden_size}; change one of them or set model.head_dim"
                )
            head_dim = model.hidden_size // model.num_attention_heads
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=model.max_position_embeddings,
            rope_theta=model.rope_theta,
            rms_norm_eps=model.rms_norm_eps,
            init_std=model.init_std,
            tie_word_embeddings=model.tie_word_embeddings,
        )
