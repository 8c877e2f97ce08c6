"""Refit on real ranks: after it, each engine buffer is the slice of the global tensor that its layout says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.grid.layout import Layout
from hpcrl.launch import exits
from hpcrl.launch.world import World
from hpcrl.model.shape import ModelShape
from hpcrl.reshard import messages, windows
from hpcrl.reshard.executor import Refit, RefitReport
from hpcrl.reshard.pieces import Cell, megatron_cells, tensorrt_llm_cells
from hpcrl.reshard.planner import Resharding
from hpcrl.reshard.verification import ChecksumMismatch
from hpcrl.roles.refit import refit_metrics
from hpcrl.rollout.native.engine import NativeEngine
from tests.mpi.layouts import SHAPE as TRAINED
from tests.mpi.layouts import TIED, make_batch, part_of, policy_loss, role_groups

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
# 5 MB in fp32; rows of 1 KiB and more
LARGE = ModelShape(
    num_layers=1,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=32,
    vocab_size=512,
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
ALL_TO_TWO = {2: (Layout((0, 1), pp=2), Layout((0, 1), tp=2)), 4: (Layout((0, 1, 2, 3), tp=4), Layout((0, 1, 2, 3), tp=2))}


def tensors(cells: list[Cell], rank: int, dtype: torch.dtype, shift: float = 0.0) -> dict[str, Tensor]:
    """The rank's shards of a model whose every element has a value of its own (times a common factor)."""
    found = {}
    for cell in cells:
        for shard, name in zip(cell.shards, cell.dst_names, strict=True) if rank in cell.ranks else ():
            whole = torch.arange(torch.Size(shard.global_shape).numel(), dtype=torch.float32) + shift + len(shard.name)
            whole = whole.view(shard.global_shape[0], -1) / 3
            local = torch.zeros(shard.local_shape).view(shard.local_shape[0], -1)
            for box in shard.boxes:
                part = whole[slice(*box.global_rows), slice(*box.global_cols)]
                rows, cols = part.shape
                local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols] = part
            found[name] = local.view(shard.local_shape).to(dtype)
    return found


class Sides:
    """A source with values, a destination without, and the refit between them."""

    def __init__(
        self,
        world: World,
        source: Layout,
        destination: Layout,
        *,
        shape: ModelShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        ranks_per_node: int | None = None,
        weight_format: str = "megatron",
        **options: Any,
    ) -> None:
        self.rank, self.dtype = world.rank, dtype
        self.resharding = Resharding(
            shape,
            source,
            destination,
            dtype.itemsize,
            ranks_per_node=ranks_per_node,
            destination_format=weight_format,  # type: ignore[arg-type]
        )
        self.source_cells = megatron_cells(shape, source, "lm")
        trtllm = weight_format == "tensorrt_llm"
        self.cells = tensorrt_llm_cells(shape, destination) if trtllm else megatron_cells(shape, destination, "lm")
        self.source = self.trained()
        expected = self.expected()
        self.destination = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
        if trtllm:
            for tensor in self.destination.values():
                tensor.zero_()  # the engine's padding, which nobody writes
        self.takes_part = world.rank in source or world.rank in destination
        nodes = None if ranks_per_node is None else [rank // ranks_per_node for rank in range(world.size)]
        self.refit = (
            Refit(self.resharding, world.comm, world.rank, dtype, nodes=nodes, **options) if self.takes_part else None
        )

    def trained(self, shift: float = 0.0) -> dict[str, Tensor]:
        return tensors(self.source_cells, self.rank, torch.float32, shift)

    def expected(self, shift: float = 0.0) -> dict[str, Tensor]:
        return tensors(self.cells, self.rank, self.dtype, shift)

    def run(self) -> RefitReport | None:
        return self.refit.run(self.source, self.destination) if self.refit else None

    def close(self) -> None:
        if self.refit:
            self.refit.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [100, 3000, 2**20])
@pytest.mark.parametrize("ranks_per_node", [None, 2, 1], ids=["windows", "mixed", "messages"])
def test_engine_buffers_are_filled_in_place(world, ranks_per_node, bucket_bytes, dtype) -> None:
    verify = "never" if bucket_bytes == 100 else "always"  # checksums of one element at a time take their time
    for source, destination in LAYOUTS[world.size]:
        sides = Sides(
            world,
            source,
            destination,
            dtype=dtype,
            ranks_per_node=ranks_per_node,
            bucket_bytes=bucket_bytes,
            verify=verify,
        )
        addresses = {name: tensor.data_ptr() for name, tensor in sides.destination.items()}
        for shift in (0.0, 0.125):
            sides.source = sides.trained(shift)
            report = sides.run()
            for name, expected in sides.expected(shift).items():
                torch.testing.assert_close(sides.destination[name], expected, rtol=0, atol=0)
                assert sides.destination[name].data_ptr() == addresses[name]
            if report is not None:
                assert report.bytes_received == sides.resharding.lower_bound(world.rank)
                assert report.peak_extra_bytes <= bucket_bytes
        sides.close()


@pytest.mark.parametrize("ranks_per_node", [None, 1], ids=["windows", "messages"])
def test_tensorrt_llm_tables(world, ranks_per_node) -> None:
    everyone = tuple(range(world.size))
    layouts = Layout(everyone, pp=min(2, world.size)), Layout(everyone, tp=min(2, world.size))
    sides = Sides(world, *layouts, weight_format="tensorrt_llm", ranks_per_node=ranks_per_node, verify="always")
    sides.run()
    for name, expected in sides.expected().items():
        torch.testing.assert_close(sides.destination[name], expected, rtol=0, atol=0)
    sides.close()


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [3000, 2**20])
def test_device_messages(world, bucket_bytes, dtype) -> None:
    """The way between GPUs, over a group of host tensors: shows the order of messages, and nothing about NCCL."""
    everyone = dist.new_group(list(range(world.size)))
    for source, destination in LAYOUTS[world.size]:
        sides = Sides(world, source, destination, dtype=dtype, bucket_bytes=bucket_bytes, device_group=everyone)
        for _ in range(2):
            report = sides.run()
            for name, expected in sides.expected().items():
                torch.testing.assert_close(sides.destination[name], expected, rtol=0, atol=0)
            assert report is None or report.peak_extra_bytes <= bucket_bytes
        sides.close()


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made while it is entered: alive now, and at most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            pointer = storage.data_ptr()
            if pointer not in inputs and pointer not in self._known and storage.nbytes():
                self._known.add(pointer)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, pointer, storage.nbytes())
        return out

    def _free(self, pointer: int, nbytes: int) -> None:
        self._known.discard(pointer)
        self.now -= nbytes


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1000, 2**18], ids=["less_than_a_row", "256KiB"])
@pytest.mark.parametrize("ranks_per_node", [None, 2, 1], ids=["windows", "mixed", "messages"])
def test_memory_stays_within_the_bucket(world, ranks_per_node, bucket_bytes, dtype) -> None:
    """Weights of megabytes: all that a refit allocates, when it is made and when it runs, is bounded."""
    layouts = ALL_TO_TWO[world.size]
    verify = "always" if bucket_bytes > 1000 else "never"
    options = {"ranks_per_node": ranks_per_node, "bucket_bytes": bucket_bytes, "verify": verify}
    sides = Sides(world, *layouts, shape=LARGE, dtype=dtype, **options)
    kept = sum(transport.nbytes for transport in sides.refit._transports)
    with LiveBytes() as live:
        report = sides.run()
    assert 0 < kept <= kept + live.peak <= report.peak_extra_bytes <= bucket_bytes
    sides.close()
