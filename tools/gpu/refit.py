"""Refit of tensors on GPUs: bit for bit between layouts, over NCCL or, where ranks share a GPU, through the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from hpcrl.grid.layout import Layout
from hpcrl.launch import accelerator
from hpcrl.launch.world import World
from hpcrl.reshard.executor import Refit
from hpcrl.reshard.planner import Resharding
from hpcrl.reshard.windows import nodes_of
from tools.gpu.outcome import Skip, require
from tools.gpu.weights import SHAPE, held, whole_weights


def layouts(world: World) -> str:
    """Each rank has its slices, bit for bit, after each of two refits."""
    if world.size == 1:
        raise Skip("one rank moves nothing between ranks")
    whole, done = whole_weights(SHAPE), []
    for source, destination in pairs(tuple(range(world.size))):
        mine = held(SHAPE, whole, source, world.rank, world.device, torch.bfloat16)
        wanted = held(SHAPE, whole, destination, world.rank, world.device, torch.bfloat16)
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        moving = Refit(
            Resharding(SHAPE, source, destination, 2, nodes=tuple(nodes_of(world.comm))),
            world.comm,
            world.rank,
            torch.bfloat16,
            device_group=dist.group.WORLD if accelerator.has_nccl() else None,
        )
        for _ in range(2):
            report = moving.run(mine, target)
        moving.close()
        wrong = [name for name, value in wanted.items() if not torch.equal(value, target[name])]
        wrong = sum(world.exchange(wrong), [])
        require(not wrong, f"{source} -> {destination}: {len(wrong)} tensors differ, such as {wrong[:1]}")
        done.append(f"{named(source)} to {named(destination)}, {report.gb_per_second:.1f} GB/s")
    return f"bit for bit: {'; '.join(done)}"


def pairs(ranks: tuple[int, ...]) -> Iterator[tuple[Layout, Layout]]:
    yield Layout(ranks), Layout(ranks)
    yield Layout(ranks, tp=2), Layout(ranks)
    yield Layout(ranks, pp=2), Layout(ranks, tp=2)
    if len(ranks) >= 4:
        yield Layout(ranks, tp=2, pp=2), Layout(ranks)
        yield Layout(ranks, tp=4), Layout(ranks, tp=2)


def named(layout: Layout) -> str:
    return f"TP{layout.tp} PP{layout.pp} DP{layout.dp}"
