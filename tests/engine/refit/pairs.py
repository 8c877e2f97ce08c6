"""Random pairs of layouts, and models as numpy arrays whose every element has a number of its own.

The TensorRT-LLM side is sliced here from whole tensors, as its loader does, not by the table under test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from hypothesis import strategies as st

from hpcrl.engine.refit.planner import Resharding
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.runtime.layout import Layout

Tensors = dict[str, np.ndarray]
PADDING = -1  # elements that no source holds

TENSORRT_LLM = TensorRTLLM()


def make_shape(**changes: object) -> ModelShape:
    sizes = {
        "num_layers": 4,
        "hidden_size": 4,
        "ffn_hidden_size": 8,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "head_dim": 2,
        "vocab_size": 50,
    }
    return ModelShape(**(sizes | changes))  # type: ignore[arg-type]


def two_dimensional(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape if len(shape) == 2 else (shape[0], 1)  # type: ignore[return-value]


@cache
def global_tensors(shape: ModelShape) -> Tensors:
    tensors, start = {}, 0
    for shard in shards(shape):
        rows, cols = two_dimensional(shard.global_shape)
        tensors[shard.name] = np.arange(start, start + rows * cols, dtype=np.int64).reshape(rows, cols)
        start += rows * cols
    return tensors


def megatron_tensors(shape: ModelShape, layout: Layout) -> dict[int, Tensors]:
    """Every rank's local tensors by global name."""
    whole = global_tensors(shape)
    return {
        rank: {shard.name: _local(whole[shard.name], shard) for shard in shards(shape, layout, rank)}
        for rank in layout.ranks
    }


def _local(whole: np.ndarray, shard: Shard) -> np.ndarray:
    local = np.full(two_dimensional(shard.local_shape), PADDING)
    for box in shard.boxes:
        part = whole[slice(*box.global_rows), slice(*box.global_cols)]
        rows, cols = part.shape
        local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols] = part
    return local


def tensorrt_llm_tensors(shape: ModelShape, layout: Layout) -> dict[int, Tensors]:
    """Every rank's tensors by the engine's names, each sliced from a whole Hugging Face tensor."""
    places = [dict(_engine_tensors(shape, tp, layout.tp)) for tp in range(layout.tp)]
    return {rank: places[layout.coord(rank).tp] for rank in layout.ranks}


def _engine_tensors(shape: ModelShape, tp: int, size: int) -> Iterator[tuple[str, np.ndarray]]:
    whole = global_tensors(shape)
    groups, width = shape.num_query_groups, shape.head_dim
    queries = shape.num_attention_heads // groups

    def slice_of(tensor: np.ndarray, axis: int) -> np.ndarray:
        length = math.ceil(tensor.shape[axis] / size)
        tensor = np.pad(
            tensor, [(0, length * size - n if a == axis else 0) for a, n in enumerate(tensor.shape)],
            constant_values=PADDING,
        )  # fmt: skip
        return np.take(tensor, range(tp * length, (tp + 1) * length), axis)

    yield "model.embed_tokens.weight", slice_of(whole["embedding.word_embeddings.weight"][: shape.vocab_size], 0)
    yield "model.norm.weight", whole["decoder.final_layernorm.weight"]
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", slice_of(whole["output_layer.weight"][: shape.vocab_size], 0)
    for layer in range(shape.num_layers):
        source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        fused = whole[f"{source}self_attention.linear_qkv.weight"].reshape(groups, queries + 2, width, -1)
        q, k, v = (part.reshape(-1, shape.hidden_size) for part in np.split(fused, [queries, queries + 1], axis=1))
        if size > groups:  # each key-value head on several ranks
            k, v = (
                np.repeat(t.reshape(groups, width, -1), size // groups, axis=0).reshape(-1, shape.hidden_size)
                for t in (k, v)
            )
        gate, up = np.split(whole[f"{source}mlp.linear_fc1.weight"], 2)
        yield f"{target}self_attn.qkv_proj.weight", np.concatenate([slice_of(t, 0) for t in (q, k, v)])
        yield f"{target}self_attn.o_proj.weight", slice_of(whole[f"{source}self_attention.linear_proj.weight"], 1)
        yield f"{target}mlp.gate_up_proj.weight", np.concatenate([slice_of(t, 0) for t in (gate, up)])
        yield f"{target}mlp.down_proj.weight", slice_of(whole[f"{source}mlp.linear_fc2.weight"], 1)
        yield f"{target}input_layernorm.weight", whole[f"{source}input_layernorm.weight"]
        yield f"{target}post_attention_layernorm.weight", whole[f"{source}pre_mlp_layernorm.weight"]


def destination_tensors(resharding: Resharding) -> dict[int, Tensors]:
    if resharding.engine_shards is not None:
        return tensorrt_llm_tensors(resharding.shape, resharding.destination)
    return megatron_tensors(resharding.shape, resharding.destination)


@st.composite
def layouts(draw: st.DrawFn, *, stages: bool, experts: bool, largest: int) -> Layout:
    """At most `largest` ranks, somewhere among the first 2 * largest, in order or not."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.integers(1, 3)) if stages else 1
    vpp = draw(st.integers(1, 4 // pp)) if pp > 1 else 1
    cp = draw(st.integers(1, 2)) if stages else 1
    while tp * pp * cp > largest:
        tp, cp = max(tp // 2, 1), 1
    dp = draw(st.integers(1, min(6, largest // (tp * pp * cp))))
    size = tp * pp * cp * dp
    ep, etp = 1, 1
    if experts:
        fitting = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if size % (ep * etp * pp) == 0]
        ep, etp = draw(st.sampled_from(fitting))
    first = draw(st.integers(0, largest))
    ranks: list[int] = list(range(first, first + size))
    if draw(st.booleans()):
        ranks = list(draw(st.permutations(ranks)))
    return Layout(ranks=tuple(ranks), tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp)


@st.composite
def nodes_of_ranks(draw: st.DrawFn, size: int) -> tuple[int, ...] | None:
    """Blocks of equal size, ranks dealt out in turn, or nodes of any size."""
    per_node, kind = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from(["one", "blocks", "cyclic", "any"]))
    if kind == "one":
        return None
    if kind == "any":
        return tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    return tuple(rank // per_node if kind == "blocks" else rank % per_node for rank in range(size))


@st.composite
def reshardings(draw: st.DrawFn, *, largest: int = 16) -> Resharding:
    """Dense or MoE, uneven stages, chunks, tied or not, both formats; pools equal, overlapping or disjoint."""
    experts = draw(st.booleans())
    to_engine = not experts and draw(st.booleans())
    source = draw(layouts(stages=True, experts=experts, largest=largest))
    if to_engine:
        tp = draw(st.sampled_from([1, 2, 4, 8]))
        dp = draw(st.integers(1, max(1, largest // tp)))
        first = draw(st.integers(0, largest))
        destination = Layout(tuple(range(first, first + tp * dp)), tp=tp)
    else:
        destination = draw(layouts(stages=draw(st.booleans()), experts=experts, largest=largest))
    shape = make_shape(
        num_layers=draw(st.integers(4, 5)),
        tie_word_embeddings=draw(st.booleans()),
        num_experts=4 if experts else 0,
        moe_ffn_hidden_size=4 if experts else 0,
        dense_layers=draw(st.sampled_from([(), (1, 3)])) if experts else (),
    )
    return Resharding(
        shape,
        source,
        destination,
        itemsize=8,
        nodes=draw(nodes_of_ranks(1 + max(*source.ranks, *destination.ranks))),
        engine_shards=TENSORRT_LLM.shards if to_engine else None,
    )
