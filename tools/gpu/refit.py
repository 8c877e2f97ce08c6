"""Refit of tensors on GPUs: bit for bit between layouts, over NCCL or, where ranks share a GPU, through the host; and
its speed on one of them and between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engine.refit.planner import RankTraffic, Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.engine.refit.transports import nodes_of
from hpcrl.machine.measure_rank import pair_link
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import accelerator
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import DENSE, SHAPE, held, shape_of, whole_weights
from tools.gpu.outcome import Skip, print_head, print_row, require

REPETITIONS = 6  # the first is left out


def layouts(world: World) -> str:
    """Each rank has its slices, bit for bit, after each of two refits."""
    if world.size == 1:
        raise Skip("one rank moves nothing between ranks")
    whole, done = whole_weights(SHAPE), []
    for source, destination in pairs(tuple(range(world.size))):
        mine = held(SHAPE, whole, source, world.rank, world.device, torch.bfloat16)
        expected = held(SHAPE, whole, destination, world.rank, world.device, torch.bfloat16)
        target = {name: torch.zeros_like(value) for name, value in expected.items()}
        wrong, speed = [], None
        moving = started(world, SHAPE, source, destination)
        if moving is not None:
            for _ in range(2):
                report = moving.run(mine, target)
                speed = (report.bytes_received + report.bytes_copied) / report.seconds / 1e9
            moving.close()
            wrong = [name for name, value in expected.items() if not torch.equal(value, target[name])]
        wrong = sum(world.all_gather_object(wrong), [])
        require(not wrong, f"{source} -> {destination}: {len(wrong)} tensors differ, such as {wrong[:1]}")
        fastest = max(filter(None, world.all_gather_object(speed)), default=0.0)
        done.append(f"{named(source)} to {named(destination)}, {fastest:.1f} GB/s")
    return f"bit for bit: {'; '.join(done)}"


def started(world: World, model: ModelShape, source: Layout, destination: Layout, **options: Any) -> Refit | None:
    """A refit in bf16, on its ranks. Collective over the world."""
    ranks = sorted({*source.ranks, *destination.ranks})
    group = dist.new_group(ranks) if accelerator.has_nccl() else None  # as a job has it, not connected yet
    nodes = tuple(nodes_of(world.comm))
    if world.rank not in ranks:
        return None
    resharding = Resharding(model, source, destination, 2, nodes=nodes)
    return Refit(resharding, world.comm, world.rank, torch.bfloat16, device_group=group, **options)


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


def planned(world: World) -> str:
    """Of 1.5B weights between layouts, with checksums: the bytes are the planned ones; seconds beside those that the
    busiest rank's bytes take at the fastest link's bandwidth."""
    if world.size == 1:
        raise Skip("one rank moves nothing between ranks")
    model, nodes, count = shape_of(DENSE), tuple(nodes_of(world.comm)), 0
    link = fastest_link(world, nodes)
    print_head(world, "refit", "MB moved", "between nodes", "busiest rank", "ms", "at the link's bandwidth", "times")
    for source, destination in pairs(tuple(range(world.size))):
        if model.num_query_groups % max(source.tp, destination.tp):
            continue
        resharding = Resharding(model, source, destination, 2, nodes=nodes)
        traffic = resharding.traffic()
        busiest = max(max(it.sent, it.received) for it in traffic.values())
        if not busiest:
            continue  # each rank has its own
        seconds = moved(world, model, source, destination, traffic)
        moves = (sum(it.received for it in traffic.values()), resharding.cross_node_bytes(), busiest)
        cells = (*(nbytes / 1e6 for nbytes in moves), seconds * 1e3, busiest / link * 1e3, seconds * link / busiest)
        print_row(world, f"{named(source)} to {named(destination)}", *(f"{cell:.1f}" for cell in cells))
        count += 1
    return f"{count} refits with the planned bytes and equal checksums; fastest link {link / 1e9:.1f} GB/s"


def fastest_link(world: World, nodes: tuple[int, ...]) -> float:
    """Bytes per second between the first two ranks of a node, or of two nodes if that is more. Collective."""
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    return max(pair_link(world, (0, peer))[1] for peer in {1, other})


def moved(
    world: World, model: ModelShape, source: Layout, destination: Layout, traffic: Mapping[int, RankTraffic]
) -> float:
    """Median seconds until the last rank has its weights. Collective."""
    moving, seconds = started(world, model, source, destination, verify="always"), []
    mine, target = (weights_of(model, layout, world) for layout in (source, destination))
    for _ in range(REPETITIONS):
        world.barrier()
        took = 0.0
        if moving:
            report = moving.run(mine, target)
            took, nbytes = report.seconds, (report.bytes_sent, report.bytes_received)
            require(nbytes == traffic[world.rank][:2], f"{nbytes} bytes sent, received; planned {traffic[world.rank]}")
        seconds.append(max(world.all_gather_object(took)))
    if moving:
        moving.close()
    return statistics.median(seconds[1:])


def weights_of(model: ModelShape, layout: Layout, world: World) -> dict[str, Tensor]:
    """Of this rank, in bf16: a value for each parameter, which is the same in all layouts."""
    table = shards(model, layout, world.rank) if world.rank in layout else ()
    like = {"dtype": torch.bfloat16, "device": world.device}
    return {it.name: torch.full(it.local_shape, crc32(it.name.encode()) % 256, **like) for it in table}


def speed(world: World) -> str:
    """Of one rank's 1.5B weights into an engine's own buffers, beside a copy of as many bytes."""
    model, layout = shape_of(DENSE), Layout((world.rank,))
    source = weights_of(model, layout, world)
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
