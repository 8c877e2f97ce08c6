"""The layout of weights that TensorRT-LLM and vLLM share: queries, keys and values of a rank in one matrix, gate and up
in another, under the names of Hugging Face's modules. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from hpcrl.config.roles import divisors
from hpcrl.model.blocks.attention import Attention
from hpcrl.model.blocks.block import Block, Box, Size, Weight
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.blocks.mixture import MixtureOfExperts
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, Shard, shard_of
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

# Modules of a layer, by Megatron's names.
MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attn.qkv_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
}
EXPERTS = {"linear_fc1.weight": "w13_weight", "linear_fc2.weight": "w2_weight"}  # of a mixture, by Megatron's names


def check_layout(
    shape: ModelShape, size: int, engine: str, windows: Collection[str] = (), mixtures: Collection[str] = ()
) -> None:
    """Raise InputError if the layout of a block is not known, or if tensor parallelism does not divide the model.

    Args:
        windows, mixtures: families whose windows of attention and whose experts the engine has under these names.
    """
    for number, layer in enumerate(shape.layers):
        attention, mlp, norms = layer.attention, layer.mlp, layer.norms
        has_window = isinstance(attention, Attention) and attention.window is not None
        is_known = {
            attention.title: isinstance(attention, Attention)
            and attention.is_common
            and not (attention.qk_norm and attention.zero_centered),
            "attention with a window": not has_window or shape.family in windows,
            mlp.title: (type(mlp) is FeedForward and mlp.is_swiglu) or (shape.family in mixtures and is_plain(mlp)),
            "scaled embeddings": shape.embedding_scale == 1.0,
            norms.title: norms == Norms(),
        }
        if unknown := [title for title, known in is_known.items() if not known]:
            raise InputError(
                f"rollout.engine={engine}: its layout of {unknown[0]} (layer {number}) is not known; use engine=native"
            )
    _check_divisible(shape, size)


def is_plain(mlp: Block) -> bool:
    """Whether it is a mixture whose router is a softmax, without shared experts, biases and groups."""
    return isinstance(mlp, MixtureOfExperts) and mlp == MixtureOfExperts(
        mlp.hidden_size, mlp.num_experts, mlp.ffn_hidden_size, mlp.topk, mlp.norm_topk_prob
    )


def _check_divisible(shape: ModelShape, size: int) -> None:
    for layer in {*shape.layers}:
        heads = layer.attention.num_heads if isinstance(layer.attention, Attention) else 1
        width = layer.mlp.inner_width // max(layer.mlp.choices, 1)
        for what, number in (("num_attention_heads", heads), ("ffn_hidden_size", width)):
            if number % size:
                raise InputError(
                    f"placement.rollout.tp={size} does not divide {what}={number}; use one of {divisors(number)}"
                )
        groups = layer.attention.num_groups if isinstance(layer.attention, Attention) else 1
        if groups % size and size % groups:
            raise InputError(
                f"placement.rollout.tp={size} and num_query_groups={groups}: one must divide the other; "
                f"use one of {divisors(groups)}, or a multiple of {groups}"
            )


def fused_shards(shape: ModelShape, rank: int, size: int, vocabulary_rows: int) -> Iterator[Shard]:
    """Yield the parameters of one of `size` ranks, as rectangles of Megatron's tensors.

    `local_name` is the engine's name, `name` and boxes are Megatron's; `x[3]` is the matrix of expert 3 in the engine's
    tensor x (experts, rows, columns), of which each rank has a part. A rank has `vocabulary_rows` rows of the
    vocabulary; rows of padding are in no box. With more ranks than key-value heads each head is on several ranks. Tied
    embeddings are one parameter, `model.embed_tokens.weight`.
    """
    yield _vocabulary(EMBEDDING, "model.embed_tokens.weight", shape, rank, vocabulary_rows)
    for number, layer in enumerate(shape.layers):
        for weight in layer.weights:
            module, _, kind = weight.name.rpartition(".")
            names = f"decoder.layers.{number}.{weight.name}", f"model.layers.{number}.{MODULES[module]}.{kind}"
            if module == "self_attention.linear_qkv":
                assert isinstance(layer.attention, Attention)
                yield _qkv(*names, weight.size, layer.attention, rank, size)
            else:
                yield shard_of(weight, rank, size, *names)
        for expert in range(layer.num_experts):
            for weight in layer.expert_weights:
                name = f"decoder.layers.{number}.mlp.experts.local_experts.{expert}.{weight.name}"
                local_name = f"model.layers.{number}.mlp.experts.{EXPERTS[weight.name]}[{expert}]"
                yield shard_of(weight, rank, size, name, local_name, is_expert=True)
    norm = Weight("decoder.final_layernorm.weight", (shape.hidden_size,))
    yield shard_of(norm, rank, size, norm.name, "model.norm.weight")
    if not shape.tie_word_embeddings:
        yield _vocabulary(OUTPUT_LAYER, "lm_head.weight", shape, rank, vocabulary_rows)


def _vocabulary(name: str, local_name: str, shape: ModelShape, rank: int, rows: int) -> Shard:
    hidden = shape.hidden_size
    first, end = min(rank * rows, shape.vocab_size), min((rank + 1) * rows, shape.vocab_size)
    boxes = (Box((first, end), (0, hidden), 0, 0),) if first < end else ()
    return Shard(name, local_name, (shape.padded_vocab_size, hidden), (rows, hidden), boxes, False)


def _qkv(name: str, local_name: str, whole: Size, attention: Attention, rank: int, size: int) -> Shard:
    """[q; k; v] of the rank's heads. Megatron orders rows by query group: its queries, its key, its value."""
    heads, groups, width = attention.num_heads, attention.num_groups, attention.head_dim
    queries = heads // groups
    stride = (queries + 2) * width  # rows of one group
    here = range(rank * heads // size, (rank + 1) * heads // size)
    kv_heads = range(here.start // queries, -(-here.stop // queries))
    spans = []  # first row, number
    for group in kv_heads:
        first, end = max(here.start, group * queries), min(here.stop, (group + 1) * queries)
        spans.append((group * stride + (first - group * queries) * width, (end - first) * width))
    for place in (queries, queries + 1):
        spans += [(group * stride + place * width, width) for group in kv_heads]
    boxes, local_row = list[Box](), 0
    for first, rows in spans:
        boxes.append(Box((first, first + rows), (0, math.prod(whole[1:])), local_row, 0))
        local_row += rows
    return Shard(name, local_name, whole, (local_row, *whole[1:]), tuple(boxes), False)
