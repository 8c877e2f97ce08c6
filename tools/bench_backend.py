"""All-reduce of 1 KB and 64 MB over mpi_host and over gloo: `mpiexec -n 2 python tools/bench_backend.py`."""

from __future__ import annotations

import time

import checkout  # noqa: F401
import torch
import torch.distributed as dist

from hpcrl.runtime.world import World, finish, start_mpi, start_torch


def seconds_each(group: dist.ProcessGroup | None, tensor: torch.Tensor, calls: int) -> float:
    """Median over 5 rounds of the mean time of `calls` all-reduces of `tensor`."""
    rounds = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[2]


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


if __name__ == "__main__":
    compare(start_torch(start_mpi()))
    finish(0)
