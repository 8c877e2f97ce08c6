"""Messages and all-reduces between ranks, measured through torch.distributed as jobs use it: MPI on the CPU, NCCL
between GPUs.

The path with NCCL has not run on several GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpcrl.machine.fits import bus_bandwidth, fit_link, group_sizes
from hpcrl.machine.measure_device import synchronize

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

MESSAGES = (4, 2**16, 2**20, 2**23)  # bytes
REPEATS = 15
TURN, TURNS = (384, 384), 200  # a product of about a millisecond, and how often
STREAM = 8  # of the largest messages, from every rank of a node at the same time
REDUCED = {"cpu": 2**23, "cuda": 2**28}  # bytes of an all-reduce


def pair_link(world: World, pair: tuple[int, int]) -> tuple[float, float]:
    """(latency, bandwidth) of messages between two ranks, from half the time of a round trip. Collective."""
    times = []
    for nbytes in MESSAGES:
        world.barrier()
        times.append(_round_trip(world, pair, nbytes) / 2 if world.rank in pair else 0.0)
    return fit_link(MESSAGES, world.broadcast_object(times, root=pair[0]))


def _round_trip(world: World, pair: tuple[int, int], nbytes: int) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    first = world.rank == pair[0]
    peer = pair[1] if first else pair[0]
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        synchronize(world.device)
        found.append(time.perf_counter() - began)
    return median(found[1:])  # the first one connects


def node_network(world: World, first: Sequence[int], second: Sequence[int]) -> float:
    """Bytes per second from one node to another if all of their ranks send at the same time. Collective.

    first, second: ranks of the two nodes; rank i of one sends to rank i of the other.
    """
    message = torch.zeros(MESSAGES[-1], dtype=torch.uint8, device=world.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=world.device)
    mine = 0.0
    for _ in range(2):  # the first time connects
        world.barrier()
        began = time.perf_counter()
        for source, target in zip(first, second, strict=False):
            if world.rank == source:
                for _ in range(STREAM):
                    dist.send(message, target)
                dist.recv(answer, target)
            elif world.rank == target:
                for _ in range(STREAM):
                    dist.recv(message, source)
                dist.send(answer, source)
        synchronize(world.device)
        mine = STREAM * message.numel() / (time.perf_counter() - began) if world.rank in first else 0.0
    paired = min(len(first), len(second))
    rates = world.all_gather_object(mine)
    return sum(rates[rank] for rank in first[:paired])


def contention(world: World, local: Sequence[int]) -> float:
    """Seconds that an all-reduce of two ranks takes longer while more ranks of their node compute than have cores, the
    most of all ranks. Collective.

    local: ranks of this rank's node; neighbours are pairs. All compute and reduce in turn, which takes longer than the
    products and the all-reduces one by one.
    """
    pairs = [tuple(local[place : place + 2]) for place in range(0, len(local) - 1, 2)]
    every = sorted({pair for pairs in world.all_gather_object(pairs) for pair in pairs})
    groups = {pair: dist.new_group(list(pair)) for pair in every}
    mine = next((pair for pair in pairs if world.rank in pair), None)
    values, factor = torch.zeros(MESSAGES[1] // 4, device=world.device), torch.randn(*TURN, device=world.device)

    def turns(computes: bool, reduces: bool) -> float:
        world.barrier()
        began = time.perf_counter()
        for _ in range(TURNS if mine is not None else 0):
            if computes:
                torch.mm(factor, factor)
            if reduces:
                dist.all_reduce(values, group=groups[mine])  # type: ignore[index]
        synchronize(world.device)
        return (time.perf_counter() - began) / TURNS

    both, products, reduced = (turns(*which) for which in ((True, True), (True, False), (False, True)))
    return max(0.0, *world.all_gather_object(both - products - reduced))


def bus_bandwidths(world: World) -> dict[int, float]:
    """Bus bandwidth of fp32 all-reduces of the first 2, 4, 8, ... ranks, by the number of ranks. Collective.

    Ranks outside a group wait.
    """
    found = {}
    values = torch.zeros(REDUCED[world.device.type] // 4, device=world.device)
    for size in group_sizes(world.size):
        group = dist.new_group(list(range(size)))
        seconds = _all_reduce(world, values, group) if world.rank < size else 0.0
        found[size] = bus_bandwidth(size, 4 * values.numel(), world.broadcast_object(seconds))
    return found


def _all_reduce(world: World, values: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    found = []
    for _ in range(REPEATS // 2 + 1):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        synchronize(world.device)
        found.append(time.perf_counter() - began)
    return median(found[1:])
