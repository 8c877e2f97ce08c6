"""The architecture of a model in numbers, the operations of a pass, and low-rank adapters. No torch, no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

from hpcrl.model.blocks.attention import Attention, Rope, RopeScaling
from hpcrl.model.blocks.block import Block, Layer, blocks_of
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.latent import Latent, LatentAttention
from hpcrl.model.blocks.micro_batch import MicroBatch, seen_pairs
from hpcrl.model.blocks.mixture import MixtureOfExperts, RoutedExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout

if TYPE_CHECKING:
    from hpcrl.config.schema import ModelConfig


VOCAB_MULTIPLE = 64


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
    norms: Norms = field(default=Norms(), repr=False)
    blocks: tuple[Layer, ...] = field(default=(), repr=False)  # all layers, of a family with blocks of its own
    # config.json as it was read, of a family with blocks of its own, whose fields say less.
    hf_keys: str = field(default="", repr=False, compare=False)
    # Of each layer, tokens that attention sees, None for all; empty: all in all layers.
    windows: tuple[int | None, ...] = field(default=(), repr=False)
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    embedding_scale: float = field(default=1.0, repr=False)  # factor of the embeddings, not of the tied output weights
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
        if self.rope.dim % 2:
            raise InputError(f"model.head_dim={self.rope.dim} is odd; rotary embeddings need an even width")
        if self.num_experts and not self.moe_ffn_hidden_size:
            raise InputError(f"model.num_experts={self.num_experts} needs model.moe_ffn_hidden_size; set it")
        if self.num_experts and self.moe_topk > self.num_experts:
            raise InputError(
                f"model.moe_topk={self.moe_topk} is more than model.num_experts={self.num_experts}; use fewer"
            )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        if self.blocks:
            return self.blocks
        dense = FeedForward(self.hidden_size, self.ffn_hidden_size)
        mixture = self._mixture() if self.num_experts else dense
        windows, dense_layers = self.windows or (None,) * self.num_layers, {*self.dense_layers}
        kinds = {
            (window, mlp): Layer(self._attention(window), mlp, self.norms)
            for window in {*windows}
            for mlp in (dense, mixture)
        }
        return tuple(kinds[window, dense if layer in dense_layers else mixture] for layer, window in enumerate(windows))

    @cached_property
    def routed(self) -> RoutedExperts | None:
        """The experts of the model; None: no layer has any."""
        numbers = tuple(number for number, layer in enumerate(self.layers) if layer.num_experts)
        mixtures = {self.layers[number].mlp for number in numbers}
        if not mixtures:
            return None
        (mixture,) = mixtures
        return RoutedExperts(numbers, mixture.count_of_experts, mixture.choices)

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """The different blocks of all layers."""
        return tuple(dict.fromkeys(block for layer in self.layers for block in layer.blocks))

    def _attention(self, window: int | None) -> Block:
        if self.mla is not None:
            scale = self.softmax_scale
            return Latent(self.hidden_size, self.rope, self.num_attention_heads, self.head_dim, self.mla, scale)
        return Attention(
            self.hidden_size,
            self.rope,
            self.num_attention_heads,
            self.num_query_groups,
            self.head_dim,
            qkv_bias=self.qkv_bias,
            qk_norm="head" if self.qk_norm else "",
            window=window,
            zero_centered=self.norms.zero_centered,
        )

    def _mixture(self) -> MixtureOfExperts:
        return MixtureOfExperts(
            self.hidden_size,
            self.num_experts,
            self.moe_ffn_hidden_size,
            self.moe_topk,
            norm_topk_prob=self.moe_norm_topk_prob,
            shared_ffn_hidden_size=self.moe_shared_ffn_hidden_size,
            score_function=self.moe_score_function,
            has_score_bias=self.moe_score_bias,
            num_groups=self.moe_num_groups,
            topk_groups=self.moe_topk_groups,
            group_best=self.moe_group_best,
            routed_scale=self.moe_routed_scale,
        )

    def check_longest(self, tokens: int, keys: str, model: str) -> None:
        """Raise InputError if sequences of so many tokens, which `keys` allow, are too long for this model."""
        if tokens > self.max_position_embeddings:
            raise InputError(
                f"{keys} = {tokens} exceeds the {self.max_position_embeddings} tokens that {model} supports; shorten "
                "them"
            )

    def check_windows(self, other: ModelShape, where: str) -> None:
        """Raise InputError if other weights for this model, of the shape `other`, have other windows of attention."""
        longest = self.max_position_embeddings
        for number, (own, found) in enumerate(zip(self.layers, other.layers, strict=False)):
            expected, window = (layer.attention.sees or longest for layer in (own, found))
            if min(expected, longest) != min(window, longest):
                raise InputError(
                    f"{where}: attention in layer {number} sees {window} tokens, and {expected} in the model that it "
                    "is for; name this directory in the model's path"
                )

    @property
    def rope(self) -> Rope:
        """The rotary embedding of all layers of a family without blocks of its own."""
        dim = self.mla.qk_rope_head_dim if self.mla else self.head_dim
        return Rope(dim, self.rope_theta, self.rope_scaling, None if self.vision is None else self.vision.rope_axes)

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys: 1 / sqrt(head_dim), and DeepSeek's correction of yarn."""
        scale = self.head_dim**-0.5
        scaling = self.rope_scaling
        if self.mla is None or scaling is None or scaling.factor <= 1:
            return scale
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    @property
    def has_stacked_experts(self) -> bool:
        """Whether its Hugging Face directories, or the modules to which PEFT adds adapters, have a layer's experts in
        one tensor."""
        return self.family in ("gpt_oss", "qwen3_vl_moe") or (self.family == "nemotron_h" and self.routed is not None)

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


def forward_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int) -> float:
    """Return the operations of one pass over sequences of these lengths, with the head at `num_outputs` of their
    tokens.

    Each weight of a matrix counts 2 per token, active experts only. Each head of causal attention counts 2 * head_dim *
    (L + 1) L / 2 for the scores and 2 * v_head_dim * (L + 1) L / 2 for the values. Norms, rotary embedding and softmax
    do not count (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). For a vision tower see
    `hpcrl.model.vision.tower_flops`.
    """
    per_token, per_output, per_pair = operations(shape)
    each = list(lengths)
    attention = sum(width * seen_pairs(length, sees) for sees, width in per_pair for length in each)
    return per_token * sum(each) + per_output * num_outputs + attention


def training_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int, *, has_adapters: bool = False) -> float:
    """Return the operations of a forward and a backward pass.

    The backward pass takes two products per product, and recomputation does not count. If only adapters are trained, it
    takes one per product with a weight, and the adapters' own products are negligible.
    """
    each = list(lengths)
    total = 3.0 * forward_flops(shape, each, num_outputs)
    if not has_adapters:
        return total
    per_token, per_output, _ = operations(shape)
    return total - per_token * sum(each) - per_output * num_outputs


@cache
def operations(shape: ModelShape) -> tuple[float, float, tuple[tuple[int | None, float], ...]]:
    """Return the operations of a forward pass per token, per output of the head, and per pair of tokens of which one
    attends to the other, by the tokens that a token sees (see `seen_pairs`)."""
    token, per_token = MicroBatch(Layout((0,)), 1, 1), 0.0
    per_pair: dict[int | None, float] = {}
    for block, count in blocks_of(shape.layers).items():
        its = block.computation(token)
        per_token += count * sum(each.rows * sum(map(math.prod, each.matrices)) for each in its.products)
        per_pair[its.sees] = per_pair.get(its.sees, 0.0) + 2.0 * count * its.pair_width
    return 2.0 * per_token, 2.0 * shape.padded_vocab_size * shape.hidden_size, tuple(per_pair.items())


# Projections with adapters, by Llama's names.
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION_PROJECTIONS, "gate_proj", "up_proj", "down_proj")
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
