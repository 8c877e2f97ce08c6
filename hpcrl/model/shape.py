"""The architecture of a model in numbers, and its low-rank adapters. No torch, no ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import ModelConfig


VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding is extended beyond the sequence length of the first training; names are those of
    config.json, formulas are in `hpcrl.model.blocks.rope`."""

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
    window: int | None = field(default=None, repr=False)  # tokens that attention sees; only full attention is computed
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
    vision: Vision | None = None
    # Not in the repr, because files that earlier versions wrote are named by it.
    tokenizer_size: int | None = field(default=None, repr=False)  # ids up to the last token; None: not known

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
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is computed as the model means it: within the window, attention in a
        window is full attention."""
        return min(self.max_position_embeddings, self.window or self.max_position_embeddings)

    def check_longest(self, tokens: int, keys: str, model: str) -> None:
        """Raise InputError if sequences of so many tokens, which `keys` allow, are too long for this model."""
        if self.window is not None and tokens > self.window:
            raise InputError(
                f"{keys} = {tokens} exceeds sliding_window={self.window} of {model}; only full attention is computed, "
                "which is the same within the window: shorten them, or use a model without one"
            )
        if tokens > self.max_position_embeddings:
            raise InputError(
                f"{keys} = {tokens} exceeds the {self.max_position_embeddings} tokens that {model} supports; shorten "
                "them"
            )

    def check_window(self, window: int | None, where: str) -> None:
        """Raise InputError if this model's sequences may exceed the window of other weights for it."""
        if window is not None and window < self.longest_sequence:
            raise InputError(
                f"{where} has sliding_window={window}, and the model that it is for has sequences of up to "
                f"{self.longest_sequence} tokens; only full attention is computed: name this directory in the model's "
                f"path, or set its max_position_embeddings to {window}"
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
    def has_stacked_experts(self) -> bool:
        """Whether its Hugging Face directories have a layer's experts in one tensor."""
        return self.family == "qwen3_vl_moe"

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The MoE layers."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe_layer(layer))

    @property
    def tokens_per_patch(self) -> float:
        """What the vision tower's work on a patch is worth in tokens of the language model: a patch counts as the
        tower's layers times their width, a token as the language model's."""
        if self.vision is None:
            return 0.0
        tower = self.vision.tower
        return tower["depth"] * tower["hidden_size"] / (self.num_layers * self.hidden_size)

    @property
    def softmax_size(self) -> int:
        """Ids that have a probability, the first of the vocabulary: the tokenizer's, or all. The others are never
        drawn, and their rows of the output layer get no gradient."""
        return self.vocab_size if self.tokenizer_size is None else self.tokenizer_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 under any layout, so that checkpoints do not depend on it."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


# Megatron's matrix -> the projections whose rows it holds, by Llama's names.
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL_LINEAR = tuple(name for names in PROJECTIONS.values() for name in names)
ATTENTION_PROJECTIONS = PROJECTIONS["linear_qkv"] + PROJECTIONS["linear_proj"]
ROW_PARALLEL = PROJECTIONS["linear_proj"] + PROJECTIONS["linear_fc2"]  # tensor parallelism splits their inputs
FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685). targets: the projections with adapters, in all layers
    and experts.

    A projection with the frozen weight W (out, in) computes (W + alpha / r B A) x; A (r, in) and B (out, r) are
    trained. Adapters belong to Hugging Face's projections; a Megatron matrix holds several of them.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ALL_LINEAR

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_config(cls, model: ModelConfig) -> Lora | None:
        """Read a section `model:`; None if it has no adapters."""
        if model.lora_rank == 0:
            return None
        named = tuple(name for name in ALL_LINEAR if name in model.target_modules)
        return cls(model.lora_rank, model.lora_alpha, named)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter."""
    return name.endswith(FACTORS)


def matrix_of(name: str) -> tuple[str, str]:
    """Split decoder.layers.0.mlp.linear_fc1.weight into "decoder.layers.0.mlp." and "linear_fc1"; the second is "" if
    the parameter is not a matrix of projections."""
    stem = name.removesuffix(".weight")
    matrix = stem.rpartition(".")[2]
    return stem.removesuffix(matrix), matrix if matrix in PROJECTIONS and name.endswith(".weight") else ""


def rows_of_projections(shape: ModelShape, matrix: str, rows: int) -> tuple[int, dict[str, int]]:
    """Return how `rows` rows of a matrix, a rank's or all, hold its projections: the number of blocks, and the rows of
    each projection per block. Blocks of linear_qkv are query groups; other matrices have one block."""
    names = PROJECTIONS[matrix]
    if matrix == "linear_qkv":
        queries = shape.num_attention_heads // shape.num_query_groups * shape.head_dim
        each = dict(zip(names, (queries, shape.head_dim, shape.head_dim), strict=True))
    else:
        each = dict.fromkeys(names, rows // len(names))
    return rows // sum(each.values()), each


def projections_in(shape: ModelShape, name: str, rows: int) -> tuple[int, dict[str, int]]:
    """Return how `rows` rows of the parameter `name` hold matrices of the Hugging Face file: those of
    `rows_of_projections`, or one block of one matrix."""
    _, matrix = matrix_of(name)
    return rows_of_projections(shape, matrix, rows) if matrix else (1, {"": rows})
