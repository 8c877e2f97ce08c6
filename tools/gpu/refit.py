"""Refit of tensors on GPUs: bit for bit between layouts, over NCCL or, where ranks share a GPU, through the host; and
its speed on one of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.engine.refit.transports import nodes_of
from hpcrl.model.params import shards
from hpcrl.runtime import accelerator
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import DENSE, shape_of
from tools.gpu.outcome import Skip, require
from tools.gpu.weights import SHAPE, held, whole_weights

REPETITIONS = 6  # the first is left out


def layouts(world: World) -> str:
    """Each rank has its slices, bit for bit, after each of two refits."""
    if world.size == 1:
        raise Skip("one rank moves nothing between ranks")
    whole, done = whole_weights(SHAPE), []
    for source, destination in pairs(tuple(range(world.size))):
        mine = held(SHAPE, whole, source, world.rank, world.device, torch.bfloat16)
        wanted = held(SHAPE, whole, destination, world.rank, world.device, torch.bfloat16)
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        ranks = sorted({*source.ranks, *destination.ranks})
        group = dist.new_group(ranks) if accelerator.has_nccl() else None  # as a job has it, not connected yet
        nodes = tuple(nodes_of(world.comm))
        wrong, speed = [], None
        if world.rank in ranks:
            resharding = Resharding(SHAPE, source, destination, 2, nodes=nodes)
            moving = Refit(resharding, world.comm, world.rank, torch.bfloat16, device_group=group)
            for _ in range(2):
                report = moving.run(mine, target)
                speed = (report.bytes_received + report.bytes_copied) / report.seconds / 1e9
            moving.close()
            wrong = [name for name, value in wanted.items() if not torch.equal(value, target[name])]
        wrong = sum(world.all_gather_object(wrong), [])
        require(not wrong, f"{source} -> {destination}: {len(wrong)} tensors differ, such as {wrong[:1]}")
        fastest = max(filter(None, world.all_gather_object(speed)), default=0.0)
        done.append(f"{named(source)} to {named(destination)}, {fastest:.1f} GB/s")
    return f"bit for bit: {'; '.join(done)}"


def pairs(ranks: tuple[int, ...]) -> Iterator[tuple[Layout, Layout]]:
    yield Layout(ranks), Layout(ranks)
    yield Layout(ranks[:1]), Layout(ranks[1:2])
    yield Layout(ranks, tp=2), Layout(ranks)
    yield Layout(ranks, pp=2), Layout(ranks, tp=2)
    if len(ranks) >= 4:
        yield Layout(ranks, tp=2, pp=2), Layout(ranks)
        yield Layout(ranks, tp=4), Layout(ranks, tp=2)


def named(layout: Layout) -> str:
    return f"TP{layout.tp} PP{layout.pp} DP{layout.dp}"


def speed(world: World) -> str:
    """Of one rank's 1.5B weights into an engine's own buffers, beside a copy of as many bytes."""
    model, layout = shape_of(DENSE), Layout((world.rank,))
    table = shards(model)
    source = {shard.name: torch.empty(shard.local_shape, dtype=torch.bfloat16, device=world.device) for shard in table}
    for weight in source.values():
        weight.normal_()
    target = {name: torch.zeros_like(weight) for name, weight in source.items()}
    refit = Refit(Resharding(model, layout, layout, 2), world.comm, world.rank, torch.bfloat16, verify="always")
    reports = [refit.run(source, target) for _ in range(REPETITIONS)][1:]
    refit.close()
    nbytes = sum(weight.nbytes for weight in source.values())
    seconds = statistics.median(report.seconds for report in reports)
    checksums = statistics.median(report.checksum_seconds for report in reports)
    memcpy = copy_seconds(nbytes, world.device)
    return (
        f"{nbytes / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, {nbytes / seconds / 1e9:.0f} GB/s; a copy takes "
        f"{memcpy * 1e3:.1f} ms, {nbytes / memcpy / 1e9:.0f} GB/s; checksums of both sides {checksums * 1e3:.1f} ms"
    )


def copy_seconds(nbytes: int, device: torch.device) -> float:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(REPETITIONS):
        accelerator.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
