"""Refit on real ranks: after it, each engine buffer is the slice of the global tensor that its layout says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.refit import messages, transports
from hpcrl.engine.refit.pieces import ShardGroup, megatron_shard_groups
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit, RefitReport
from hpcrl.engine.refit.verification import ChecksumMismatch
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.model.params import quantized_names
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.run.rollouts.source import refit_metrics
from hpcrl.runtime import exits
from hpcrl.runtime.groups import RoleGroups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.watchdog import format_ranks
from hpcrl.runtime.world import World
from tests.covering import covering
from tests.engine.refit.pairs import TENSORRT_LLM
from tests.live_bytes import LiveBytes, all_tensors
from tests.mpi.layouts import SHAPE as TRAINED
from tests.mpi.layouts import TIED, make_batch, part_of, policy_loss, role_groups

pytestmark = pytest.mark.ci_world(4)

DTYPES = (torch.float32, torch.bfloat16)
TRANSPORTS = {"windows": None, "mixed": 2, "messages": 1}  # ranks of a node

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
# 0.3, 0.1 and 4 MB in fp32; rows of 256 bytes and more
MEDIUM = ModelShape(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    vocab_size=64,
)
THIN = replace(MEDIUM, num_layers=1, ffn_hidden_size=64)
LARGE = replace(MEDIUM, hidden_size=256, ffn_hidden_size=512)

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
ALL_TO_TWO = {
    2: (Layout((0, 1), pp=2), Layout((0, 1), tp=2)),
    4: (Layout((0, 1, 2, 3), tp=4), Layout((0, 1, 2, 3), tp=2)),
}


def tensors(groups: list[ShardGroup], rank: int, dtype: torch.dtype, shift: float = 0.0) -> dict[str, Tensor]:
    """The rank's shards of a model whose every element has a value of its own (times a common factor)."""
    found = {}
    for group in groups:
        for shard in group.shards if rank in group.ranks else ():
            whole = torch.arange(torch.Size(shard.global_shape).numel(), dtype=torch.float32) + shift + len(shard.name)
            whole = whole.view(shard.global_shape[0], -1) / 3
            local = torch.zeros(shard.local_shape).view(shard.local_shape[0], -1)
            for box in shard.boxes:
                part = whole[slice(*box.global_rows), slice(*box.global_cols)]
                rows, cols = part.shape
                local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols] = part
            found[shard.local_name] = local.view(shard.local_shape).to(dtype)
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
        nodes = None if ranks_per_node is None else tuple(rank // ranks_per_node for rank in range(world.size))
        self.resharding = Resharding(
            shape,
            source,
            destination,
            dtype.itemsize,
            nodes=nodes,
            engine_shards=TENSORRT_LLM.shards if weight_format == "tensorrt_llm" else None,
        )
        self.source_groups, self.groups = self.resharding.source_groups, self.resharding.destination_groups
        self.source = self.trained()
        expected = self.expected()
        self.destination = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
        if weight_format == "tensorrt_llm":
            for tensor in self.destination.values():
                tensor.zero_()  # the engine's padding, which nobody writes
        self.takes_part = world.rank in source or world.rank in destination
        self.refit = Refit(self.resharding, world.comm, world.rank, dtype, **options) if self.takes_part else None

    def trained(self, shift: float = 0.0) -> dict[str, Tensor]:
        return tensors(self.source_groups, self.rank, torch.float32, shift)

    def expected(self, shift: float = 0.0) -> dict[str, Tensor]:
        return tensors(self.groups, self.rank, self.dtype, shift)

    def run(self) -> RefitReport | None:
        return self.refit.run(self.source, self.destination) if self.refit else None

    def close(self) -> None:
        if self.refit:
            self.refit.close()


@covering(dtype=DTYPES, bucket_bytes=(100, 3000, 2**20), ranks_per_node=TRANSPORTS)
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
                assert report.bytes_received == sides.resharding.traffic()[world.rank].received
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
@pytest.mark.parametrize(("bucket_bytes", "dtype"), [(3000, torch.float32), (2**20, torch.bfloat16)])
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


def quantized(
    groups: list[ShardGroup], rank: int, source: Callable[[float], dict[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor | Fp8Matrix]:
    """The rank's shards `source` as an engine has them: 8-bit numbers by whole rows of the global tensors."""
    names, found = quantized_names(SHAPE, "fp8"), dict[str, Tensor | Fp8Matrix](source(0.0))
    for group in groups:
        for shard in group.shards if rank in group.ranks else ():
            if shard.name not in names:
                continue
            numbers = torch.arange(torch.Size(shard.global_shape).numel(), dtype=torch.float32) + len(shard.name)
            amax = (numbers.view(shard.global_shape) / 3).to(dtype).float().amax(1)
            scales = torch.ones(shard.local_shape[0], 1)
            for box in shard.boxes:
                top, bottom = box.global_rows
                scales[box.local_row : box.local_row + bottom - top, 0] = amax[top:bottom] / 448
            found[shard.name] = Fp8Matrix.of(found[shard.name], scales, dtype)
    return found


@pytest.mark.slow_world(4)
@pytest.mark.parametrize(("transport", "dtype"), [("windows", DTYPES[0]), ("messages", DTYPES[1]), ("nccl", DTYPES[1])])
def test_an_engine_in_8_bits(world, transport, dtype) -> None:
    """Numbers and scales are those of whole rows, bit for bit, whatever the layouts; a wrong one is found."""
    group = dist.new_group(list(range(world.size))) if transport == "nccl" else None
    names = quantized_names(SHAPE, "fp8")
    options = {"ranks_per_node": TRANSPORTS.get(transport), "bucket_bytes": 3000, "device_group": group}
    for source, destination in LAYOUTS[world.size]:
        sides = Sides(world, source, destination, dtype=dtype, verify="always", quantized=names, **options)
        expected = quantized(sides.groups, world.rank, sides.expected, dtype)
        for name in names & expected.keys():
            sides.destination[name] = Fp8Matrix.zeros(expected[name].shape, dtype, torch.device("cpu"))
        sides.run()
        for name, its in expected.items():
            found = sides.destination[name]
            if isinstance(its, Fp8Matrix):
                torch.testing.assert_close(found.scales, its.scales, rtol=0, atol=0)
                found, its = found.numbers.view(torch.int8), its.numbers.view(torch.int8)
            torch.testing.assert_close(found, its, rtol=0, atol=0)
        if sides.takes_part:
            name = f"decoder.layers.{SHAPE.num_layers - 1}.mlp.linear_fc2.weight"
            if world.rank == destination.ranks[-1]:
                sides.destination[name].numbers[-1, -1] = 0.0
            with pytest.raises(ChecksumMismatch, match=f"{name} on rank {destination.ranks[-1]};"):
                sides.refit._verifier.check(sides.source, sides.destination)
        sides.close()


@pytest.mark.slow_world(4)
@pytest.mark.world(2, 4)
@covering(
    dtype=DTYPES,
    case={"rows_larger": (THIN, 240, "never"), "large": (LARGE, 2**18, "always")},
    ranks_per_node=TRANSPORTS,
)
def test_memory_stays_within_the_bucket(world, ranks_per_node, case, dtype) -> None:
    """Also where a row is larger than the bucket."""
    shape, bucket_bytes, verify = case
    layouts = ALL_TO_TWO[world.size]
    options = {"ranks_per_node": ranks_per_node, "bucket_bytes": bucket_bytes, "verify": verify}
    sides = Sides(world, *layouts, shape=shape, dtype=dtype, **options)
    kept = sum(transport.nbytes for transport in sides.refit._transports)
    with LiveBytes(apart=all_tensors()) as live:
        report = sides.run()
    assert 0 < kept <= kept + live.peak <= report.peak_extra_bytes <= bucket_bytes
    sides.close()


@pytest.mark.slow_world(4)
@pytest.mark.parametrize(("shape", "dtype"), [(TRAINED, torch.bfloat16), (TIED, torch.float32)], ids=["untied", "tied"])
def test_aliases_stay_the_actors_weights(world, shape, dtype) -> None:
    """Over optimizer steps and loaded weights, of a real engine on both sides; and generation reads them."""
    groups = role_groups(world.rank, world.size)[{1: "single", 2: "tp2", 4: "tp2dp2"}[world.size]]
    actor = TrainEngine(shape, groups, optim=OptimConfig(lr=1e-2), seed=3, dtype=dtype)
    engine, other = (native_engine(shape, groups, dtype) for _ in range(2))
    layout = groups.layout
    resharding = Resharding(shape, layout, layout, dtype.itemsize)
    refit = Refit(resharding, world.comm, world.rank, dtype, verify="always")
    total = sum(tensor.nbytes for tensor in engine.weights().values())

    def update() -> None:
        refit.share(actor.named_shards(), engine.weights(), engine.adopt)
        report = refit.run(actor.named_shards(), engine.weights())
        assert (report.bytes_received, report.bytes_copied, report.bytes_aliased) == (0, 0, total)

    update()
    addresses = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in actor.named_shards().items()}
        actor.train(part_of(make_batch(), groups), max_tokens=64, loss=policy_loss, entropy=True)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in actor.named_shards().items())
        update()
    state = {name: torch.full_like(parameter, 0.25) for name, parameter in actor.chunks[0].named_parameters()}
    actor.load_state_dict({"model": state})
    assert all(bool((tensor == 0.25).all()) for tensor in engine.weights().values())
    actor.train(part_of(make_batch(), groups), max_tokens=64, loss=policy_loss, entropy=True)
    update()
    assert addresses == {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    assert addresses == {name: tensor.data_ptr() for name, tensor in actor.named_shards().items()}

    assert refit.run(actor.named_shards(), other.weights()).bytes_copied == total
    requests = [Request([1, 2, 3], "a"), Request([4, 5], "b")]
    for one, two in zip(
        *(of.generate(requests, SamplingParams(8), seed=1, step=0) for of in (engine, other)), strict=True
    ):
        assert one.token_ids.tolist() == two.token_ids.tolist() and one.log_probs.tolist() == two.log_probs.tolist()
    refit.close()


def native_engine(shape: ModelShape, groups: RoleGroups, dtype: torch.dtype) -> NativeEngine:
    tp_group = groups.tp if groups.layout.tp > 1 else None
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 32}
    engine = NativeEngine(shape, tp_group, groups.coord.tp, groups.layout.tp, dtype, **sizes)
    engine.wake()
    return engine


@pytest.mark.world(2, 4)
def test_only_equal_slices_are_aliased(world) -> None:
    """Where the rest moves, norms of the rank's own layers are shared, and stay right when the actor's change."""
    sides = Sides(world, *ALL_TO_TWO[world.size], verify="always")
    for shift in (0.0, 0.125):
        for name, tensor in sides.trained(shift).items():
            sides.source[name].copy_(tensor)
        sides.refit.share(sides.source, sides.destination, sides.destination.__setitem__)
        report = sides.run()
        aliased = [name for name, tensor in sides.destination.items() if tensor is sides.source.get(name)]
        assert report.bytes_aliased == sum(sides.destination[name].nbytes for name in aliased) > 0
        assert report.bytes_received == sides.resharding.traffic()[world.rank].received > 0
        for name, expected in sides.expected(shift).items():
            torch.testing.assert_close(sides.destination[name], expected, rtol=0, atol=0)
    sides.close()


def flip_first_byte(rank: int) -> Callable[..., Any]:
    """A packing or unpacking function that on `rank` finds one byte of the buffer changed, once."""
    left = [rank]

    def wrap(function: Callable[..., None], here: int, place: int, after: bool) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if after:
                function(*args)
            if here in left:
                left.remove(here)
                args[place][1] ^= 4
            if not after:
                function(*args)

        return call

    return wrap


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("weight_format", ["megatron", "tensorrt_llm"])
@pytest.mark.parametrize("place", ["window", "message", "engine"])
def test_one_corrupted_byte_is_caught_and_named(world, place, weight_format, monkeypatch) -> None:
    source, destination = ALL_TO_TWO[world.size]
    ranks_per_node = 1 if place == "message" else None
    options = {"weight_format": weight_format, "dtype": torch.bfloat16, "ranks_per_node": ranks_per_node}
    sides = Sides(world, source, destination, **options)
    sides.run()
    wrap = flip_first_byte(world.size - 1)
    if place == "window":
        monkeypatch.setattr(transports, "pack", wrap(transports.pack, world.rank, 2, True))
    elif place == "message":
        monkeypatch.setattr(messages, "unpack", wrap(messages.unpack, world.rank, 1, False))
    else:

        def check(source: Any, destination: dict[str, Tensor], real: Any = sides.refit._verifier.check) -> None:
            if world.rank == world.size - 1:
                next(iter(destination.values())).view(-1).view(torch.int16)[5] ^= 1
            real(source, destination)

        monkeypatch.setattr(sides.refit._verifier, "check", check)
    with pytest.raises(ChecksumMismatch) as caught:
        sides.run()
    assert exits.exit_code(caught.value) == exits.CHECKSUM

    wrong = [name for name, tensor in sides.expected().items() if not torch.equal(tensor, sides.destination[name])]
    by_rank = world.all_gather_object(wrong)
    named = {name for names in by_rank for name in names}
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    assert len(named) == 1
    where = f"{named.pop()} on {format_ranks(ranks)};"
    assert where in str(caught.value)
    sizes = "pp=2" if world.size == 2 else "tp=4"
    assert f"actor ({sizes}, ranks 0-{world.size - 1}) -> rollout (tp=2" in str(caught.value)
    sides.close()


@pytest.mark.parametrize(("verify", "times"), [("first", 2), ("always", 3), ("never", 0)])
def test_checksums_are_compared_as_often_as_asked(world, verify, times, monkeypatch) -> None:
    sides = Sides(world, Layout((0,)), Layout((0,)), verify=verify)
    if sides.refit:
        calls = []
        monkeypatch.setattr(sides.refit._verifier, "check", lambda *_: calls.append(None))
        for _ in range(3):
            sides.run()
        assert len(calls) == times
    sides.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks_per_node", [None, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["windows", "messages"]
)
def test_a_hundred_refits_leave_memory_flat(world, ranks_per_node) -> None:
    layouts = ALL_TO_TWO.get(world.size, LAYOUTS[1][0])
    sides = Sides(world, *layouts, shape=MEDIUM, ranks_per_node=ranks_per_node, verify="always")

    def repeat(times: int) -> int:
        for _ in range(times):
            sides.refit.share(sides.source, sides.destination, sides.destination.__setitem__)
            sides.run()
        return psutil.Process().memory_info().rss

    before = repeat(5)
    assert repeat(100) <= 1.01 * before
    sides.close()


def test_metrics_of_all_ranks(world) -> None:
    layouts = ALL_TO_TWO.get(world.size, LAYOUTS[1][0])
    sides = Sides(world, *layouts)
    metrics = refit_metrics(world.all_gather_object(sides.run()))
    received = sum(its.received for its in sides.resharding.traffic().values())
    assert metrics["perf/refit/gib_received"] == received / 2**30
    needed = sum(world.all_gather_object(sum(tensor.nbytes for tensor in sides.destination.values())))
    assert metrics["perf/refit/gib_copied"] == pytest.approx((needed - received) / 2**30)
    assert metrics["perf/refit/gb_per_s"] > 0 and metrics["perf/refit/peak_extra_mib"] > 0
    sides.close()


def test_a_dtype_that_was_not_planned_is_refused(world) -> None:
    layout = Layout(tuple(range(world.size)))
    refit = Refit(Resharding(SHAPE, layout, layout, 4), world.comm, world.rank, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        refit.run({}, tensors(megatron_shard_groups(SHAPE, layout, "lm"), world.rank, torch.bfloat16))
    refit.close()


@pytest.mark.world(4)
def test_too_little_memory_for_the_peers_is_refused(world) -> None:
    with pytest.raises(ValueError, match="buffers"):
        Sides(world, *ALL_TO_TWO[4], ranks_per_node=1, bucket_bytes=8)
