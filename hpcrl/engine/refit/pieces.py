"""What each rank of a layout holds, and what the destination needs of it: rectangles and their holders."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from hpcrl.config.placement import divisors
from hpcrl.model.blocks.attention import Attention
from hpcrl.model.blocks.block import Box, Layer, Size, Weight, unsupported
from hpcrl.model.blocks.feed_forward import FeedForward
from hpcrl.model.hf_files import peft_shards, plan_files
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, Head, Shard, shard_of, shards
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout

Extent: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of a global tensor, (first, end)


def check_tensorrt_llm(shape: ModelShape, tp_size: int) -> None:
    """Raise InputError if the engine does not support the model, or if its layout of it is unknown."""
    if block := unsupported(shape.layers, "tensorrt_llm"):
        raise InputError(f"rollout.engine=tensorrt_llm: its layout of {block} is not known; use engine=native")
    if shape.softmax_size < shape.vocab_size:
        raise InputError(
            f"rollout.engine=tensorrt_llm draws from all {shape.vocab_size} ids of the model, and the tokenizer has "
            f"{shape.softmax_size}; use engine=native, or model.softmax_vocab=config, with which all ids are trained on"
        )
    for layer in {*shape.layers}:
        attention, mlp = _parts(layer)
        for what, size in (("num_attention_heads", attention.num_heads), ("ffn_hidden_size", mlp.ffn_hidden_size)):
            if size % tp_size:
                raise InputError(
                    f"placement.rollout.tp={tp_size} does not divide {what}={size}; use one of {divisors(size)}"
                )
        groups = attention.num_groups
        if groups % tp_size and tp_size % groups:
            raise InputError(
                f"placement.rollout.tp={tp_size} and num_query_groups={groups}: one must divide the other; "
                f"use one of {divisors(groups)}, or a multiple of {groups}"
            )


def _parts(layer: Layer) -> tuple[Attention, FeedForward]:
    """The blocks of a layer that TensorRT-LLM supports."""
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, FeedForward)
    return layer.attention, layer.mlp


def tensorrt_llm_shards(shape: ModelShape, *, tp_rank: int, tp_size: int) -> list[Shard]:
    """Return the parameters of one rank of TensorRT-LLM's PyTorch engine, as rectangles of Megatron's tensors.

    `local_name` is the engine's name, `name` and boxes are Megatron's. Names and shapes are those of the unquantized
    parameters of a Llama-like model in version 1.2; they have not been compared on a GPU yet. Rows are split as in
    Megatron, except that the vocabulary is padded to a multiple of `tp_size` only (rows of padding are in no box and
    stay 0), and that with more ranks than key-value heads each head is on several ranks. Tied embeddings are one
    parameter, `model.embed_tokens.weight`. Raises InputError as `check_tensorrt_llm`.
    """
    check_tensorrt_llm(shape, tp_size)
    return list(_shards(shape, tp_rank, tp_size))


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
}


def _shards(shape: ModelShape, rank: int, size: int) -> Iterator[Shard]:
    yield _vocabulary(EMBEDDING, "model.embed_tokens.weight", shape, rank, size)
    for number, layer in enumerate(shape.layers):
        for weight in layer.weights:
            module, _, kind = weight.name.rpartition(".")
            names = f"decoder.layers.{number}.{weight.name}", f"model.layers.{number}.{MODULES[module]}.{kind}"
            if module == "self_attention.linear_qkv":
                yield _qkv(*names, weight.size, _parts(layer)[0], rank, size)
            else:
                yield shard_of(weight, rank, size, *names)
    norm = Weight("decoder.final_layernorm.weight", (shape.hidden_size,))
    yield shard_of(norm, rank, size, norm.name, "model.norm.weight")
    if not shape.tie_word_embeddings:
        yield _vocabulary(OUTPUT_LAYER, "lm_head.weight", shape, rank, size)


def _vocabulary(name: str, local_name: str, shape: ModelShape, rank: int, size: int) -> Shard:
    rows, hidden = -(-shape.vocab_size // size), shape.hidden_size
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


class ShardGroup(NamedTuple):
    """Ranks with the same shards: all replicas of one place in a layout's dense or expert grid.

    `local_name` of a shard is its destination's name: in Megatron's format the global one.
    """

    ranks: tuple[int, ...]
    shards: list[Shard]


class Piece(NamedTuple):
    """A rectangle that a destination group needs, the `number`-th of it, and the source groups that hold it.

    All holders have the same values, at different places of their local tensors: `origins` has one (row, col) per
    holder.
    """

    number: int
    name: str
    dst_name: str
    holders: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]
    dst_row: int
    dst_col: int
    rows: int
    cols: int


def megatron_shard_groups(shape: ModelShape, layout: Layout, head: Head, lora: Lora | None = None) -> list[ShardGroup]:
    """Return the groups of the dense grid (tp fastest, then pp), then those of the expert grid (etp, ep, pp)."""
    dense, experts = layout.groups("cp", "dp"), layout.groups("edp") if shape.routed is not None else []
    return [
        *(_named_globally(r, shards(shape, layout, r[0], head=head, part="dense", lora=lora)) for r in dense),
        *(_named_globally(r, shards(shape, layout, r[0], part="experts", lora=lora)) for r in experts),
    ]


def tensorrt_llm_shard_groups(shape: ModelShape, layout: Layout) -> list[ShardGroup]:
    return [
        ShardGroup(ranks, tensorrt_llm_shards(shape, tp_rank=tp, tp_size=layout.tp))
        for tp, ranks in enumerate(layout.groups("cp", "dp"))
    ]


def hugging_face_shard_groups(shape: ModelShape, layout: Layout, itemsize: int) -> list[ShardGroup]:
    """Return whole tensors, in the files that each rank of `layout` writes."""
    files = plan_files(shape, itemsize, layout.size)
    return [
        ShardGroup((rank,), [shard for file in files if file.writer == place for shard in file.shards])
        for place, rank in enumerate(layout.ranks)
    ]


def peft_shard_groups(shape: ModelShape, layout: Layout, lora: Lora) -> list[ShardGroup]:
    """Return all adapters, whole, on each rank."""
    return [ShardGroup(layout.ranks, peft_shards(shape, lora))]


def _named_globally(ranks: tuple[int, ...], shards: list[Shard]) -> ShardGroup:
    return ShardGroup(ranks, [shard._replace(local_name=shard.name) for shard in shards])


def cut(source: list[ShardGroup], destination: list[ShardGroup]) -> list[list[Piece]]:
    """Return each destination group's pieces, in the order of its shards. What no source group holds is in no piece."""
    held = _source_rectangles(source)
    return [list(_pieces(group, held)) for group in destination]


def _pieces(group: ShardGroup, held: dict[str, dict[Extent, list[tuple[int, Box]]]]) -> Iterator[Piece]:
    number = 0
    for shard in group.shards:
        for box in shard.boxes:
            for (rows, cols), holders in held.get(shard.name, {}).items():
                part = box.within(rows, cols)
                if part is None:
                    continue
                (top, bottom), (left, right), local_row, local_col = part
                down, along = top - rows[0], left - cols[0]
                yield Piece(
                    number,
                    shard.name,
                    shard.local_name,
                    tuple(holder for holder, _ in holders),
                    tuple((source.local_row + down, source.local_col + along) for _, source in holders),
                    local_row,
                    local_col,
                    bottom - top,
                    right - left,
                )
                number += 1


def _source_rectangles(source: list[ShardGroup]) -> dict[str, dict[Extent, list[tuple[int, Box]]]]:
    """Return every rectangle of the source by parameter and extent, with the groups that have it and their boxes."""
    found: dict[str, dict[Extent, list[tuple[int, Box]]]] = defaultdict(dict)
    for number, group in enumerate(source):
        for shard in group.shards:
            for box in shard.boxes:
                found[shard.name].setdefault((box.global_rows, box.global_cols), []).append((number, box))
    return found
