"""The refit plan on random pairs of layouts, carried out in one process with numpy arrays in place of tensors."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from hpcrl.engine.refit.pieces import EngineShards
from hpcrl.engine.refit.planner import Resharding
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from tests.engine.refit.flow import least_largest_load
from tests.engine.refit.pairs import (
    PADDING,
    TENSORRT_LLM,
    destination_tensors,
    global_tensors,
    make_shape,
    megatron_tensors,
    reshardings,
    shards,
)

LLAMA_70B = ModelShape(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    head_dim=128,
    vocab_size=128256,
)


def holders(resharding: Resharding) -> np.ndarray:
    """(elements of the model,) int64: bit r is set where source rank r holds the element."""
    masks = np.zeros(sum(tensor.size for tensor in global_tensors(resharding.shape).values()), dtype=np.int64)
    for rank, tensors in megatron_tensors(resharding.shape, resharding.source).items():
        for tensor in tensors.values():
            masks[tensor] |= 1 << rank
    return masks


def node_mask(resharding: Resharding, rank: int) -> int:
    return sum(1 << r for r in range(62) if on_one_node(resharding, r, rank))


def on_one_node(resharding: Resharding, a: int, b: int) -> bool:
    nodes = resharding.nodes
    return nodes is None or (max(a, b) < len(nodes) and nodes[a] == nodes[b])


def missing(resharding: Resharding, masks: np.ndarray) -> dict[int, np.ndarray]:
    """Elements that each destination rank needs and has not; an element of a tied embedding may be needed twice."""
    found = {}
    for rank, tensors in destination_tensors(resharding).items():
        needed = np.concatenate([tensor.ravel() for tensor in tensors.values()])
        needed = needed[needed != PADDING]
        found[rank] = needed[(masks[needed] >> rank & 1) == 0]
    return found


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings())
def test_moves_give_every_destination_element_its_value_once(resharding: Resharding) -> None:
    source, expected = megatron_tensors(resharding.shape, resharding.source), destination_tensors(resharding)
    found = {rank: {n: np.full_like(t, PADDING) for n, t in tensors.items()} for rank, tensors in expected.items()}
    written = {rank: {n: np.zeros_like(t) for n, t in tensors.items()} for rank, tensors in expected.items()}

    for move in resharding.plan().moves:
        values = source[move.src_rank][move.name][
            move.src_row : move.src_row + move.rows, move.src_col : move.src_col + move.cols
        ]
        assert values.nbytes == move.nbytes > 0
        target = np.s_[move.dst_row : move.dst_row + move.rows, move.dst_col : move.dst_col + move.cols]
        found[move.dst_rank][move.dst_name][target] = values
        written[move.dst_rank][move.dst_name][target] += 1

    for rank, tensors in expected.items():
        for name, tensor in tensors.items():
            assert (found[rank][name] == tensor).all(), name
            assert (written[rank][name] == (tensor != PADDING)).all(), name


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings())
def test_bytes_received_are_the_lower_bound_and_nothing_local_is_sent(resharding: Resharding) -> None:
    masks, plan = holders(resharding), resharding.plan()
    lacking = missing(resharding, masks)
    for rank, tensors in destination_tensors(resharding).items():
        needed = sum(int((tensor != PADDING).sum()) for tensor in tensors.values())
        assert plan.traffic(rank)[1:] == (8 * len(lacking[rank]), 8 * (needed - len(lacking[rank])))
    assert resharding.traffic() == {rank: plan.traffic(rank) for rank in resharding.traffic()}


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings())
@pytest.mark.slow
def test_a_node_is_sent_only_what_none_of_its_ranks_holds(resharding: Resharding) -> None:
    masks = holders(resharding)
    least = sum(
        8 * int(((masks[elements] & node_mask(resharding, rank)) == 0).sum())
        for rank, elements in missing(resharding, masks).items()
    )
    moves = resharding.plan().moves
    assert sum(m.nbytes for m in moves if not on_one_node(resharding, m.src_rank, m.dst_rank)) == least
    assert resharding.cross_node_bytes() == least


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings())
@pytest.mark.slow
def test_each_rank_finds_its_own_part_of_the_plan(resharding: Resharding) -> None:
    moves = resharding.plan().moves
    for rank in {*resharding.source.ranks, *resharding.destination.ranks}:
        mine = tuple(move for move in moves if rank in (move.src_rank, move.dst_rank))
        assert resharding.plan_for_rank(rank).moves == mine


SCALE = 128


def larger(shape: ModelShape) -> ModelShape:
    """Every matrix SCALE times as high and as wide, so that whole rows are small parts of it."""
    sizes = ("hidden_size", "ffn_hidden_size", "head_dim", "moe_ffn_hidden_size")
    changes = {size: getattr(shape, size) * SCALE for size in sizes}
    return replace(shape, **changes, vocab_size=shape.padded_vocab_size * SCALE)


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings(largest=16))
@pytest.mark.slow
def test_the_largest_sender_is_close_to_the_exact_optimum(resharding: Resharding) -> None:
    """Senders may be chosen among the holders on the receiver's node, or else among all."""
    if resharding.engine_shards is not None:
        resharding = Resharding(**vars_of(resharding) | {"shape": replace(resharding.shape, vocab_size=64)})
    masks = holders(resharding)
    tensors = global_tensors(resharding.shape).items()
    # what one element of the small model stands for in the large one; a router has as many rows in both
    weights = np.concatenate(
        [
            np.full(tensor.size, SCALE if tensor.shape[1] == 1 or "router" in name else SCALE**2)
            for name, tensor in tensors
        ]
    )
    demands: dict[frozenset[int], int] = defaultdict(int)
    for rank, elements in missing(resharding, masks).items():
        near = masks[elements] & node_mask(resharding, rank)
        senders = np.where(near != 0, near, masks[elements])
        for mask in np.unique(senders):
            candidates = frozenset(r for r in range(62) if int(mask) >> r & 1)
            demands[candidates] += 8 * int(weights[elements[senders == mask]].sum())
    optimum = least_largest_load(demands)
    large = Resharding(**vars_of(resharding) | {"shape": larger(resharding.shape)})
    largest = max(traffic.sent for traffic in large.traffic().values())
    assert largest <= 1.05 * optimum
    assert largest >= 0.99 * optimum


def vars_of(resharding: Resharding) -> dict[str, object]:
    return {name: getattr(resharding, name) for name in Resharding.__dataclass_fields__}


@pytest.mark.parametrize("engine_shards", [None, TENSORRT_LLM.shards], ids=["megatron", "tensorrt_llm"])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Layout(tuple(range(64)), tp=8, pp=8), Layout(tuple(range(64)), tp=8)),
        (Layout(tuple(range(128)), tp=8, pp=4), Layout(tuple(range(128)), tp=4)),
        (Layout(tuple(range(128)), tp=4, pp=2, cp=2), Layout(tuple(range(128)), tp=8)),
        (Layout(tuple(range(64)), tp=8, pp=2), Layout(tuple(range(64, 160)), tp=8)),
        (Layout(tuple(range(128)), tp=8, pp=2, vpp=4), Layout(tuple(range(64)), tp=2)),
    ],
)
def test_replicas_of_a_shard_send_alike(
    source: Layout, destination: Layout, engine_shards: EngineShards | None
) -> None:
    nodes = tuple(rank // 8 for rank in range(1 + max(*source.ranks, *destination.ranks)))
    resharding = Resharding(LLAMA_70B, source, destination, 2, nodes, engine_shards=engine_shards)
    traffic = resharding.traffic()
    for replicas in source.groups("cp", "dp"):
        sent = [traffic[rank].sent for rank in replicas]
        assert max(sent) <= 1.05 * sum(sent) / len(sent)


def make_large(size: int) -> Resharding:
    ranks = tuple(range(size))
    nodes = tuple(rank // 8 for rank in ranks)
    return Resharding(LLAMA_70B, Layout(ranks, tp=8, pp=8), Layout(ranks, tp=8), 2, nodes=nodes)


def test_a_large_job() -> None:
    """The 70B model on 1,024 ranks: the end stages hold the vocabulary too, 1.089 times the mean stage."""
    ranks = tuple(range(1024))
    resharding = make_large(1024)
    traffic = resharding.traffic()
    sent = [traffic[rank].sent for rank in ranks]
    assert max(sent) / (sum(sent) / len(sent)) == pytest.approx(1.089, abs=0.001)
    stage = {tuple(sent[rank] for rank in replicas) for replicas in resharding.source.groups("dp")}
    assert all(max(its) <= 1.001 * min(its) for its in stage)
    assert resharding.cross_node_bytes() == sum(sent)
    for rank in (0, 515):
        plan = resharding.plan_for_rank(rank)
        assert plan.traffic(rank) == traffic[rank]
        assert len(plan.moves) < 2000


def test_a_ranks_plan_costs_at_most_linearly_in_the_ranks() -> None:
    def seconds(size: int) -> float:
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            make_large(size).plan_for_rank(5)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(1024) <= 1.5 * 4 * seconds(256)


def test_equal_layouts_move_nothing_and_share_all() -> None:
    layout = Layout(tuple(range(8)), tp=2)
    resharding = Resharding(make_shape(), layout, layout, itemsize=4)
    plan = resharding.plan()
    assert all(move.is_local for move in plan.moves)
    names = [shard.name for shard in shards(resharding.shape, layout, 3)]
    assert [(its.name, its.dst_name) for its in resharding.shared(3)] == [(name, name) for name in names]
    assert sum(its.nbytes for its in resharding.shared(3)) == plan.traffic(3).copied


def test_only_equal_slices_are_shared() -> None:
    source, destination = Layout((0, 1), tp=2), Layout((0, 1))
    shared = Resharding(make_shape(), source, destination, itemsize=4).shared(1)
    assert shared
    assert all("layernorm" in its.name for its in shared)
    assert Resharding(make_shape(), source, Layout((1, 0), tp=2), itemsize=4).shared(1) == shared
    engine = Resharding(make_shape(), source, source, itemsize=4, engine_shards=TENSORRT_LLM.shards).shared(1)
    names = {its.name: its.dst_name for its in engine}
    assert names["decoder.layers.3.mlp.linear_fc1.weight"] == "model.layers.3.mlp.gate_up_proj.weight"
    assert "decoder.layers.3.self_attention.linear_qkv.weight" not in names


def test_ranks_of_a_node_get_a_rectangle_from_one_sender() -> None:
    """So that a shared-memory window is packed once: 2 x TP2 to 4 whole models on one node."""
    resharding = Resharding(make_shape(), Layout((0, 1, 2, 3), tp=2), Layout((0, 1, 2, 3)), 2, nodes=(0, 0, 0, 0))
    senders: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for move in resharding.plan().moves:
        if not move.is_local:
            senders[move.name, move.dst_row, move.dst_col, move.rows, move.cols].add(move.src_rank)
    assert all(len(ranks) == 1 for ranks in senders.values())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"source": Layout(tuple(range(8)), tp=8)}, "placement.actor.tp=8"),
        ({"destination": Layout(tuple(range(8)), pp=4, vpp=2)}, r"placement.rollout.vpp\*pp=2\*4"),
        ({"source": Layout((0, 1), vpp=2)}, "vpp=2"),
        ({"source": Layout((0, 1), ep=2)}, "ep=2"),
        ({"destination": Layout((0, 1), pp=2), "engine_shards": TENSORRT_LLM.shards}, "pp=2"),
        ({"destination": Layout((0, 1, 2), tp=3), "engine_shards": TENSORRT_LLM.shards}, "tp=3"),
        ({"shape": make_shape(num_experts=2, moe_ffn_hidden_size=4), "engine_shards": TENSORRT_LLM.shards}, "experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_clear_line(changes: dict[str, object], found: str) -> None:
    layout = Layout((0, 1))
    with pytest.raises(InputError, match=found):
        Resharding(**{"shape": make_shape(), "source": layout, "destination": layout, "itemsize": 2} | changes)  # type: ignore[arg-type]
