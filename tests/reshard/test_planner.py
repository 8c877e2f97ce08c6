"""The refit plan, on random pairs of layouts, executed in one process with numpy arrays in place of tensors."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.grid.layout import Layout
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.reshard.planner import Resharding

TENSORS = dict[int, dict[str, np.ndarray]]


def make_shape(**changes: object) -> ModelShape:
    sizes = {
        "num_layers": 3,
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


def global_tensors(shape: ModelShape) -> dict[str, np.ndarray]:
    """Every element of the model has a value of its own."""
    tensors, start = {}, 0
    for shard in shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        rows, cols = two_dimensional(shard.global_shape)
        tensors[shard.name] = np.arange(start, start + rows * cols, dtype=np.int64).reshape(rows, cols)
        start += rows * cols
    return tensors


def sharded(shape: ModelShape, layout: Layout) -> TENSORS:
    whole = global_tensors(shape)
    ranks: TENSORS = {}
    for rank in layout.ranks:
        coord = layout.coord(rank)
        ranks[rank] = {}
        for shard in shards(shape, tp_rank=coord.tp, tp_size=layout.tp, pp_rank=coord.pp, pp_size=layout.pp):
            local = np.full(two_dimensional(shard.local_shape), -1, dtype=np.int64)
            for box in shard.boxes:
                part = whole[shard.name][slice(*box.global_rows), slice(*box.global_cols)]
                rows, cols = part.shape
                local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols] = part
            ranks[rank][shard.name] = local
    return ranks


@st.composite
def layouts(draw: st.DrawFn, stages: bool) -> Layout:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.integers(1, 3)) if stages else 1
    cp = draw(st.integers(1, 2)) if stages else 1
    dp = draw(st.integers(1, 3))
    size = tp * pp * cp * dp
    first = draw(st.integers(0, 12))
    ranks = list(range(first, first + size))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Layout(ranks=tuple(ranks), tp=tp, pp=pp, cp=cp)


reshardings = st.builds(
    Resharding,
    shape=st.builds(make_shape, tie_word_embeddings=st.booleans()),
    source=layouts(stages=True),
    destination=layouts(stages=False),
    itemsize=st.just(8),
    ranks_per_node=st.sampled_from([None, 1, 2, 4]),
)


@settings(deadline=None, max_examples=150)
@given(resharding=reshardings)
def test_moves_give_every_destination_element_its_value_once(resharding: Resharding) -> None:
    source = sharded(resharding.shape, resharding.source)
    expected = sharded(resharding.shape, resharding.destination)
    found = {rank: {n: np.full_like(t, -1) for n, t in tensors.items()} for rank, tensors in expected.items()}
    written = {rank: {n: np.zeros_like(t) for n, t in tensors.items()} for rank, tensors in expected.items()}

    for move in resharding.plan().moves:
        values = source[move.src_rank][move.name][
            move.src_row : move.src_row + move.rows, move.src_col : move.src_col + move.cols
        ]
        assert values.nbytes == move.nbytes
        target = np.s_[move.dst_row : move.dst_row + move.rows, move.dst_col : move.dst_col + move.cols]
        found[move.dst_rank][move.name][target] = values
        written[move.dst_rank][move.name][target] += 1

    for rank, tensors in expected.items():
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(found[rank][name], tensor)
            assert (written[rank][name] == 1).all()


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings)
def test_received_bytes_are_the_lower_bound(resharding: Resharding) -> None:
    plan = resharding.plan()
    assert all(move.is_local or move.src_rank != move.dst_rank for move in plan.moves)
    needed = sharded(resharding.shape, resharding.destination)
    had = sharded(resharding.shape, resharding.source)
    for rank, tensors in needed.items():
        values = {value for tensor in tensors.values() for value in tensor.ravel()}
        missing = values - {value for tensor in had.get(rank, {}).values() for value in tensor.ravel()}
        assert plan.bytes_received.get(rank, 0) == resharding.lower_bound(rank) == 8 * len(missing)
        assert plan.bytes_copied.get(rank, 0) == 8 * (len(values) - len(missing))
    assert sum(plan.bytes_sent.values()) == sum(plan.bytes_received.values())


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings)
def test_a_node_that_holds_a_piece_is_never_sent_it(resharding: Resharding) -> None:
    nodes = resharding.ranks_per_node or 10**9
    held = {
        (rank // nodes, value)
        for rank, tensors in sharded(resharding.shape, resharding.source).items()
        for tensor in tensors.values()
        for value in tensor.ravel()
    }
    whole = sharded(resharding.shape, resharding.destination)
    for move in resharding.plan().moves:
        if move.src_rank // nodes != move.dst_rank // nodes:
            part = whole[move.dst_rank][move.name][
                move.dst_row : move.dst_row + move.rows, move.dst_col : move.dst_col + move.cols
            ]
            assert not any((move.dst_rank // nodes, value) in held for value in part.ravel())


@settings(deadline=None, max_examples=100)
@given(resharding=reshardings)
def test_each_rank_finds_its_own_part_of_the_plan(resharding: Resharding) -> None:
    moves = resharding.plan().moves
    for rank in {*resharding.source.ranks, *resharding.destination.ranks}:
        mine = tuple(move for move in moves if rank in (move.src_rank, move.dst_rank))
        assert resharding.plan_for_rank(rank).moves == mine


def test_equal_layouts_move_nothing() -> None:
    layout = Layout(ranks=tuple(range(8)), tp=2)
    plan = Resharding(make_shape(), layout, layout, itemsize=4).plan()
    assert all(move.is_local for move in plan.moves)


def test_replicas_share_the_sending() -> None:
    """Disjoint pools, 4 source replicas and 8 destinations: each replica sends close to two models."""
    shape = make_shape(num_layers=8)
    resharding = Resharding(shape, Layout(tuple(range(4))), Layout(tuple(range(4, 12))), itemsize=2)
    sent = resharding.plan().bytes_sent
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / 4


def test_a_node_is_asked_before_the_network() -> None:
    shape = make_shape()
    source, destination = Layout((0, 4)), Layout((1, 2, 5, 6))
    moves = Resharding(shape, source, destination, itemsize=2, ranks_per_node=4).plan().moves
    assert Counter((move.src_rank, move.dst_rank) for move in moves).keys() == {(0, 1), (0, 2), (4, 5), (4, 6)}


def test_vpp_is_refused() -> None:
    with pytest.raises(ValueError, match="vpp=2"):
        Resharding(make_shape(), Layout((0, 1), pp=2, vpp=2), Layout((0, 1)), itemsize=2)


def test_a_rank_of_a_large_job_plans_in_seconds() -> None:
    """A 70B model on 1,024 ranks: TP8 x PP8 x DP16 to TP8 x 128 replicas."""
    shape = make_shape(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        num_query_groups=8,
        head_dim=128,
        vocab_size=128256,
    )
    ranks = tuple(range(1024))
    resharding = Resharding(shape, Layout(ranks, tp=8, pp=8), Layout(ranks, tp=8), itemsize=2, ranks_per_node=8)
    start = time.process_time()
    plan = resharding.plan_for_rank(0)
    assert time.process_time() - start < 20
    assert plan.bytes_received[0] == resharding.lower_bound(0)
