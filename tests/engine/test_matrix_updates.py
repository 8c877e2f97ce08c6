"""Ranges of all ranks make whole matrices, and the updated matrices the ranges, on layouts of 8 ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpcrl.algorithms.optimizers.muon import Muon, MuonParameters
from hpcrl.engine.matrix_updates import MatrixUpdates, Place
from hpcrl.model.build import copy_boxes
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.layout import Layout
from tests.mpi.layouts import DEEPSEEK, MIXTURE, SHAPE

RANKS = tuple(range(8))
LAYOUTS = {
    "tp2cp2dp2": {"tp": 2, "cp": 2},
    "tp2pp2dp2": {"tp": 2, "pp": 2},
    "tp4dp2": {"tp": 4},
    "tp2pp2vpp2ep2etp2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 2},
    "cp2ep4": {"cp": 2, "ep": 4},
}
SHAPES = {"dense": SHAPE, "mixture": MIXTURE, "deepseek": DEEPSEEK}


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).view(shape) + len(name)


def changed(matrix: torch.Tensor) -> torch.Tensor:
    """Depends on the projection's first row and its size."""
    return 2 * matrix + matrix[0] + matrix.size(0)


def expected(shape: ModelShape, name: str, matrix: torch.Tensor) -> torch.Tensor:
    """Projections by hand: of linear_qkv by head, of linear_fc1 by half."""
    result, rows = matrix.clone(), torch.arange(matrix.size(0))
    parts = [rows]
    if name.endswith("linear_qkv.weight"):
        each = shape.num_attention_heads // shape.num_query_groups
        head = rows // shape.head_dim % (each + 2)
        parts = [rows[head < each], rows[head == each], rows[head == each + 1]]
    elif name.endswith("linear_fc1.weight"):
        parts = list(rows.chunk(2))
    for part in parts:
        result[part] = changed(matrix[part])
    return result


def places(shape: ModelShape, layout: Layout, rank: int, is_expert: bool) -> dict[tuple[int, str], Place]:
    """All parameters of a rank in one bucket, one after the other."""
    part = "experts" if is_expert else "dense"
    own = shards(shape, layout, rank, part=part)
    starts = np.cumsum([0, *(math.prod(shard.local_shape) for shard in own)]).tolist()
    bucket = -(-starts[-1] // 128) * 128
    return {(shard.chunk, shard.local_name): Place(start, bucket) for shard, start in zip(own, starts, strict=False)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_expert", [False, True])
def test_ranges_come_back_updated(kind: str, name: str, is_expert: bool) -> None:
    shape = SHAPES[kind]
    sizes = LAYOUTS[name] if shape.num_experts else {k: v for k, v in LAYOUTS[name].items() if k not in ("ep", "etp")}
    if is_expert and not shape.num_experts:
        return
    layout, chosen = Layout(RANKS, **sizes), Muon(MuonParameters())
    sent, owned, results = {}, {}, {}
    for rank in RANKS:
        groups = SimpleNamespace(rank=rank, layout=layout, coord=layout.coord(rank))
        table = places(shape, layout, rank, is_expert)
        owned[rank] = MatrixUpdates(chosen, shape, groups, table, {}, is_expert=is_expert)
        for matrix in owned[rank]._plan:
            for shard, ranges in matrix.parts:
                local = torch.empty(shard.local_shape)
                copy_boxes(whole(matrix.name, shard.global_shape), local, shard)
                sent |= {(matrix.name, it.rank): local.view(-1)[it.start : it.stop] for it in ranges if it.rank == rank}
    for rank, updates in owned.items():
        received = {move.key: sent[move.key] for move in updates._to_owners if move.receiver == rank}
        for matrix in updates._plan:
            if matrix.owner == rank:
                results |= updates._update(matrix, received, changed)
        assert not received
    assert results.keys() == sent.keys()
    for rank, updates in owned.items():
        for matrix in updates._plan:
            after = expected(shape, matrix.name, whole(matrix.name, matrix.parts[0][0].global_shape))
            for shard, ranges in matrix.parts:
                local = torch.empty(shard.local_shape)
                copy_boxes(after, local, shard)
                assert sum(it.size for it in ranges) == local.numel()
                for it in ranges:
                    assert torch.equal(results[matrix.name, it.rank], local.view(-1)[it.start : it.stop])
        of_stage = {it.name for it in shards(shape, layout, rank) if it.is_matrix and it.is_expert == is_expert}
        assert of_stage <= {matrix.name for matrix in updates._plan}


def test_owners_have_nearly_equal_work() -> None:
    layout, chosen = Layout(RANKS, tp=2), Muon(MuonParameters())
    groups = SimpleNamespace(rank=0, layout=layout, coord=layout.coord(0))
    updates = MatrixUpdates(chosen, SHAPE, groups, places(SHAPE, layout, 0, False), {}, is_expert=False)
    work = dict.fromkeys(RANKS, 0.0)
    for matrix in updates._plan:
        work[matrix.owner] += updates._cost(matrix.parts[0][0])
    largest = max(updates._cost(matrix.parts[0][0]) for matrix in updates._plan)
    assert max(work.values()) <= sum(work.values()) / 8 + largest
