"""What a rank of TensorRT-LLM's PyTorch engine holds of a Llama-like model, as rectangles of Megatron's tensors.

Names and shapes are those of the unquantized parameters of version 1.2; nobody has compared them on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, Box, Shard
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError


def check_tensorrt_llm(shape: ModelShape, tp_size: int) -> None:
    """InputError where the engine cannot hold the model, or where nobody knows how it does."""
    if shape.mla:
        raise InputError(
            "rollout.engine=tensorrt_llm: how it lays out latent attention is not known here; use engine=native"
        )
    if shape.num_experts:
        raise InputError("rollout.engine=tensorrt_llm: how it lays out experts is not known here; use engine=native")
    for what, size in (
        ("num_attention_heads", shape.num_attention_heads),
        ("ffn_hidden_size", shape.ffn_hidden_size),
    ):
        if size % tp_size:
            raise InputError(
                f"placement.rollout.tp={tp_size} does not divide {what}={size}; use one of {_divisors(size)}"
            )
    groups = shape.num_query_groups
    if groups % tp_size and tp_size % groups:
        raise InputError(
            f"placement.rollout.tp={tp_size} and num_query_groups={groups}: one must divide the other; "
            f"use one of {_divisors(groups)}, or a multiple of {groups}"
        )


def tensorrt_llm_shards(shape: ModelShape, *, tp_rank: int, tp_size: int) -> list[Shard]:
    """The parameters of one rank of the engine, `local_name` by its names, `name` and boxes by Megatron's.

    Rows are split where Megatron splits them, but the vocabulary is padded to a multiple of `tp_size` only (rows of
    padding are in no box, and are to stay 0), and with more ranks than key-value heads each head is on several. Tied
    embeddings are one parameter there, `model.embed_tokens.weight`. Raises InputError as `check_tensorrt_llm`.
    """
    check_tensorrt_llm(shape, tp_size)
    return list(_shards(shape, tp_rank, tp_size))


def _shards(shape: ModelShape, rank: int, size: int) -> Iterator[Shard]:
    hidden = shape.hidden_size
    yield _vocabulary(EMBEDDING, "model.embed_tokens.weight", shape, rank, size)
    for layer in range(shape.num_layers):
        source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield _norm(f"{source}input_layernorm.weight", f"{target}input_layernorm.weight", hidden)
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            yield _qkv(
                f"{source}self_attention.linear_qkv.{kind}", f"{target}self_attn.qkv_proj.{kind}", shape, rank, size
            )
        for head in "qk" if shape.qk_norm else "":
            yield _norm(
                f"{source}self_attention.{head}_layernorm.weight",
                f"{target}self_attn.{head}_norm.weight",
                shape.head_dim,
            )
        query = shape.num_attention_heads * shape.head_dim
        yield _columns(
            f"{source}self_attention.linear_proj.weight", f"{target}self_attn.o_proj.weight", hidden, query, rank, size
        )
        yield _norm(f"{source}pre_mlp_layernorm.weight", f"{target}post_attention_layernorm.weight", hidden)
        ffn = shape.ffn_hidden_size
        halves = [(start + rank * (ffn // size), ffn // size) for start in (0, ffn)]  # gate, up
        yield _stacked(f"{source}mlp.linear_fc1.weight", f"{target}mlp.gate_up_proj.weight", (2 * ffn, hidden), halves)
        yield _columns(f"{source}mlp.linear_fc2.weight", f"{target}mlp.down_proj.weight", hidden, ffn, rank, size)
    yield _norm("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    if not shape.tie_word_embeddings:
        yield _vocabulary(OUTPUT_LAYER, "lm_head.weight", shape, rank, size)


def _norm(name: str, local_name: str, hidden: int) -> Shard:
    return Shard(name, local_name, (hidden,), (hidden,), (Box((0, hidden), (0, 1), 0, 0),), True)


def _vocabulary(name: str, local_name: str, shape: ModelShape, rank: int, size: int) -> Shard:
    rows, hidden = -(-shape.vocab_size // size), shape.hidden_size
    first, end = min(rank * rows, shape.vocab_size), min((rank + 1) * rows, shape.vocab_size)
    boxes = (Box((first, end), (0, hidden), 0, 0),) if first < end else ()
    return Shard(name, local_name, (shape.padded_vocab_size, hidden), (rows, hidden), boxes, False)


def _columns(name: str, local_name: str, rows: int, cols: int, rank: int, size: int) -> Shard:
    width = cols // size
    box = Box((0, rows), (rank * width, (rank + 1) * width), 0, 0)
    return Shard(name, local_name, (rows, cols), (rows, width), (box,), False)


def _qkv(name: str, local_name: str, shape: ModelShape, rank: int, size: int) -> Shard:
    """[q; k; v] of the rank's heads; Megatron's rows go by query group: its queries, its key, its value."""
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    queries = heads // groups
    stride = (queries + 2) * width  # rows of one group
    here = range(rank * heads // size, (rank + 1) * heads // size)
    kv_heads = range(here.start // queries, -(-here.stop // queries))
    spans = []
    for group in kv_heads:
        first, end = max(here.start, group * queries), min(here.stop, (group + 1) * queries)
        spans.append((group * stride + (first - group * queries) * width, (end - first) * width))
    for place in (queries, queries + 1):
        spans += [(group * stride + place * width, width) for group in kv_heads]
    cols = () if name.endswith(".bias") else (shape.hidden_size,)
    return _stacked(name, local_name, (groups * stride, *cols), spans)


def _stacked(name: str, local_name: str, shape: tuple[int, ...], spans: list[tuple[int, int]]) -> Shard:
    """`spans` of rows (first, number), one below the other."""
    boxes, local_row = [], 0
    for first, rows in spans:
        boxes.append(Box((first, first + rows), (0, math.prod(shape[1:])), local_row, 0))
        local_row += rows
    return Shard(name, local_name, shape, (local_row, *shape[1:]), tuple(boxes), False)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
