"""All-reduce of 1 KB and 64 MB over mpi_host and over gloo: `mpiexec -n 2 python tools/bench backend`."""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.distributed as dist
from bench.harness import timed

from hpcrl.runtime.world import World, finish, start_mpi, start_torch


def add_options(parser: argparse.ArgumentParser) -> None: ...


def main(options: argparse.Namespace) -> None:
    compare(start_torch(start_mpi()))
    finish(0)


def seconds_each(group: dist.ProcessGroup | None, tensor: torch.Tensor, calls: int) -> float:
    """Median over 5 rounds of the mean time of `calls` all-reduces of `tensor`."""

    def reduce() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)

    rounds = []
    for _ in range(5):
        dist.barrier()
        rounds.append(timed(reduce) / calls)
    return median(rounds)


def compare(world: World) -> None:
    gloo = dist.new_group(backend="gloo")
    for name, elements, calls in (("1 KB", 1 << 8, 200), ("64 MB", 1 << 24, 3)):
        tensor = torch.ones(elements)
        ours, theirs = seconds_each(None, tensor, calls), seconds_each(gloo, tensor, calls)
        if world.rank == 0:
            print(
                f"{world.size} ranks, {name:>5}: mpi_host {ours * 1e6:9.1f} us, gloo {theirs * 1e6:9.1f} us, "
                f"gloo / mpi_host = {theirs / ours:.1f}",
                flush=True,
            )
