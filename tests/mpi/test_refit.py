"""Refit on real ranks: after it, each engine buffer is the slice of the global tensor that its layout says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from hpcrl.grid.layout import Layout
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.reshard.executor import Refit
from hpcrl.reshard.planner import Resharding

if TYPE_CHECKING:
    from hpcrl.launch.world import World

SHAPE = ModelShape(
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=2,
    vocab_size=50,
    tie_word_embeddings=True,
)

LAYOUTS = {
    1: [(Layout((0,)), Layout((0,)))],
    2: [
        (Layout((0, 1), tp=2), Layout((0, 1))),
        (Layout((0, 1), pp=2), Layout((0, 1), tp=2)),
        (Layout((0,)), Layout((1,))),
        (Layout((1,)), Layout((0, 1))),
    ],
    4: [
        (Layout((0, 1, 2, 3), tp=2, pp=2), Layout((0, 1, 2, 3))),
        (Layout((0, 1, 2, 3), tp=4), Layout((0, 1, 2, 3), tp=2)),
        (Layout((0, 1, 2, 3), tp=2), Layout((0, 1, 2, 3), tp=2)),
        (Layout((0, 1), pp=2), Layout((2, 3), tp=2)),
        (Layout((0, 1, 2), pp=3), Layout((2, 3))),
    ],
}


def local_tensors(layout: Layout, rank: int, dtype: torch.dtype, shift: float = 0.0) -> dict[str, Tensor]:
    """The rank's shards of a model whose every element has a value of its own (times a common factor)."""
    if rank not in layout:
        return {}
    coord, tensors = layout.coord(rank), {}
    for shard in shards(SHAPE, tp_rank=coord.tp, tp_size=layout.tp, pp_rank=coord.pp, pp_size=layout.pp):
        whole = torch.arange(torch.Size(shard.global_shape).numel(), dtype=torch.float32) + shift + len(shard.name)
        whole = whole.view(shard.global_shape[0], -1) / 3
        local = torch.empty(shard.local_shape).view(shard.local_shape[0], -1)
        for box in shard.boxes:
            part = whole[slice(*box.global_rows), slice(*box.global_cols)]
            rows, cols = part.shape
            local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols] = part
        tensors[shard.name] = local.view(shard.local_shape).to(dtype)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_engine_buffers_are_filled_in_place(world: World, dtype: torch.dtype, bucket_bytes: int) -> None:
    for source, destination in LAYOUTS[world.size]:
        resharding = Resharding(SHAPE, source, destination, dtype.itemsize)
        plan = resharding.plan_for_rank(world.rank)
        refit = Refit(plan, world.comm, world.rank, dtype, bucket_bytes)
        expected_shapes = local_tensors(destination, world.rank, dtype)
        buffers = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected_shapes.items()}
        addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
        for shift in (0.0, 0.125):
            report = refit.run(local_tensors(source, world.rank, torch.float32, shift), buffers)
            for name, expected in local_tensors(destination, world.rank, dtype, shift).items():
                torch.testing.assert_close(buffers[name], expected, rtol=0, atol=0)
                assert buffers[name].data_ptr() == addresses[name]
            assert report.bytes_received == resharding.lower_bound(world.rank)
            assert report.bytes_sent == plan.bytes_sent.get(world.rank, 0)


def test_a_dtype_that_was_not_planned_is_refused(world: World) -> None:
    layout = Layout(tuple(range(world.size)))
    refit = Refit(Resharding(SHAPE, layout, layout, 4).plan_for_rank(world.rank), world.comm, world.rank, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        refit.run({}, local_tensors(layout, world.rank, torch.bfloat16))
