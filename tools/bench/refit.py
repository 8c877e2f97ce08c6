"""Refit against `megatron.core.resharding` over gloo and against a memcpy of the destination, side by side in one run.

    OMP_NUM_THREADS=1 mpiexec -n 4 python tools/bench refit [--bucket-mib 256] [--repetitions 5]

Layouts change for a Llama-like model of 105 M fp32 parameters. Both fill the parameters of the same kind of model;
their results are compared bit for bit. Times are from a barrier until the last rank has its weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from bench.harness import in_turn, timed
from torch import Tensor

from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit, RefitReport
from hpcrl.model.build import build_model, local_shards
from hpcrl.model.params import Shard
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import platform
from hpcrl.runtime.groups import RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World, finish, start_mpi, start_torch

from megatron.core.resharding.refit import swap_model_weights  # isort: skip

MODEL = ModelShape(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2560,
    num_attention_heads=16,
    num_query_groups=8,
    head_dim=64,
    vocab_size=8192,
)
RANKS = (0, 1, 2, 3)
CASES = {
    "TP2 x PP2 -> TP1 x 4": (Layout(RANKS, tp=2, pp=2), Layout(RANKS)),
    "TP4 -> TP2 x 2": (Layout(RANKS, tp=4), Layout(RANKS, tp=2)),
    "TP2 x DP2 -> TP2 x DP2": (Layout(RANKS, tp=2), Layout(RANKS, tp=2)),
}
SIDES = ("source", "destination")
WARM_UP = 2  # refits; their checksums are compared


class Result(NamedTuple):
    """Medians of seconds, and the report of the rank that received most."""

    ours: float
    megatron: float
    memcpy: float
    checksums: float
    report: RefitReport


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket-mib", type=int, default=256, help="memory of a refit beyond the weights, per rank")
    parser.add_argument("--repetitions", type=int, default=5)


def main(options: argparse.Namespace) -> None:
    world = start_torch(start_mpi())
    if world.size != len(RANKS):
        raise SystemExit(f"start this with {len(RANKS)} ranks, not {world.size}")
    _let_megatron_copy_without_cuda()
    layouts = {f"{side} of {name}": pair[place] for name, pair in CASES.items() for place, side in enumerate(SIDES)}
    groups = make_groups(layouts, world.rank)
    results = {}
    for name, (source, destination) in CASES.items():
        sides = [groups[f"{side} of {name}"] for side in SIDES]
        results[name] = measure(world, Resharding(MODEL, source, destination, 4), *sides, options)
    if world.rank == 0:
        show(results)
    finish(0)


def measure(
    world: World, resharding: Resharding, source: RoleGroups, destination: RoleGroups, options: argparse.Namespace
) -> Result:
    (trained,) = build_model(MODEL, source, seed=1)
    (theirs,) = build_model(MODEL, destination, seed=2)
    for model, groups in ((trained, source), (theirs, destination)):
        _mark(model, local_shards(MODEL, groups, "lm"))
    weights = _by_global_name(trained, source)
    engine = {name: torch.full_like(tensor, torch.nan) for name, tensor in _by_global_name(theirs, destination).items()}
    flat, copy = (torch.zeros(sum(tensor.numel() for tensor in engine.values())) for _ in range(2))
    refit = Refit(resharding, world.comm, world.rank, torch.float32, bucket_bytes=options.bucket_mib * 2**20)
    refit.share(weights, engine, engine.__setitem__)
    reports: list[RefitReport] = []

    @torch.no_grad()
    def change() -> None:
        """So that what is compared below came from the last refit."""
        for tensor in weights.values():
            tensor += 0.001

    ways: dict[str, Callable[[], object]] = {
        "change": change,
        "ours": lambda: reports.append(refit.run(weights, engine)),
        "megatron": lambda: swap_model_weights(trained, theirs, "gloo"),
        "memcpy": lambda: copy.copy_(flat),
    }
    seconds = in_turn(
        {name: partial(_last_of_all, world, run) for name, run in ways.items()}, options.repetitions, WARM_UP
    )
    del seconds["change"]
    for name, tensor in _by_global_name(theirs, destination).items():
        if not torch.equal(engine[name].view(torch.int32), tensor.view(torch.int32)):
            raise SystemExit(f"{name} differs from megatron's result on rank {world.rank}")
    refit.close()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    checksums = max(world.all_gather_object(reports[WARM_UP - 1].checksum_seconds))
    busiest = max(world.all_gather_object(reports[-1]), key=lambda report: report.bytes_received)
    return Result(**medians, checksums=checksums, report=busiest)


def show(results: dict[str, Result]) -> None:
    smallest = min(result.megatron for result in results.values() if result.report.bytes_received)
    head = ("layouts", "ours", "megatron", "ratio", "memcpy", "ours/memcpy", "checksums", "MB in", "copied", "aliased")
    print(f"{head[0]:<24}" + "".join(f"{title:>12}" for title in (*head[1:], "extra MiB")))
    for name, result in results.items():
        report = result.report
        cells = (
            f"{result.ours:.4f} s",
            f"{result.megatron:.3f} s",
            f"{result.megatron / result.ours:.1f}",
            f"{result.memcpy:.3f} s",
            f"{result.ours / result.memcpy:.2f}",
            f"{result.checksums:.3f} s",
            *(f"{nbytes / 1e6:.0f}" for nbytes in (report.bytes_received, report.bytes_copied, report.bytes_aliased)),
            f"{report.peak_extra_bytes / 2**20:.1f}",
        )
        print(f"{name:<24}" + "".join(f"{cell:>12}" for cell in cells))
        if not report.bytes_received:
            print(f"  nothing moves: 1/{smallest / result.ours:.0f} of megatron's fastest case where bytes move")
    print("medians, interleaved; bytes of the rank that receives most; all results equal megatron's bit for bit")


def _last_of_all(world: World, run: Callable[[], object]) -> float:
    """Seconds from a barrier until the last rank is done."""
    world.barrier()
    return max(world.all_gather_object(timed(run)))


def _by_global_name(model: torch.nn.Module, groups: RoleGroups) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {shard.name: parameters[shard.local_name].data for shard in local_shards(MODEL, groups, "lm")}


def _mark(model: torch.nn.Module, shards: list[Shard]) -> None:
    """What megatron's planner reads, which its layers set only when they draw their own weights."""
    parameters = dict(model.named_parameters())
    for shard in shards:
        parameter = parameters[shard.local_name]
        name = shard.name.removesuffix(".weight")
        parameter.partition_dim = 1 if name.endswith(("linear_proj", "linear_fc2")) else 0  # type: ignore[attr-defined]
        parameter.partition_stride = 2 if name.endswith("linear_fc1") else 1  # type: ignore[attr-defined]


def _let_megatron_copy_without_cuda() -> None:
    """Its gloo service makes a CUDA stream, which it does not use for host tensors."""

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    if not torch.cuda.is_available():
        platform.install()  # it replaces the current stream, too
        torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
        torch.cuda.current_stream = lambda device=None: Stream()  # type: ignore[assignment,return-value]
