"""Collectives over the groups that roles have are right, and how fast; one that does not end within `run.nccl_timeout`
ends the process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.engine.refit.transports import nodes_of
from hpcrl.runtime import accelerator
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World, start_mpi, start_torch
from tools.gpu.models import REHEARSAL
from tools.gpu.outcome import Skip, print_head, print_row, require

TIMEOUT, HELD = 5.0, 15.0  # seconds: of the collective, and how long its stream is busy with something else
GRACE = 60.0  # of the process's start and end
CYCLES_PER_SECOND = 2.0e9  # at most, of an H100's clock
TIMED_OUT = re.compile(r"collective operation timeout.* ran for (\d+) milliseconds")


def timeout(world: World) -> str:
    """In a process of its own, as NCCL's watchdog ends it: once the kernel that is in the way has ended, because the
    watchdog waits for the stream when it aborts the communicator. A collective that hangs by itself ends at once."""
    if world.device.type != "cuda":
        raise Skip("there is no NCCL without a GPU")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tools.gpu.nccl"], capture_output=True, text=True, timeout=HELD + GRACE
        )
    except subprocess.TimeoutExpired as error:
        require(False, f"the process was still there after {error.timeout:.0f} s; expected an end after {HELD:.0f} s")
    said = ended.stdout + ended.stderr
    print(said, flush=True)
    match = TIMED_OUT.search(said)
    require(ended.returncode != 0, f"a collective that waited for {HELD:.0f} s passed; nccl_timeout is {TIMEOUT:.0f} s")
    require(match is not None, f"ended with code {ended.returncode}, but not by a timeout")
    assert match is not None
    seconds = int(match[1]) / 1e3
    require(seconds < 2 * TIMEOUT, f"the timeout came after {seconds:.1f} s; expected {TIMEOUT:.0f}")
    return f"a collective timed out after {seconds:.1f} s of {TIMEOUT:.0f}, and the process ended by {ended.returncode}"


ELEMENTS = 2**12 if REHEARSAL else 2**25  # fp32, of each rank
MODULUS = 251  # sums over ranks of smaller integers are exact
REPETITIONS = 3 if REHEARSAL else 6  # the first connects and is left out


def all_reduce(mine: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(mine, group=group)
    return mine


def all_gather(mine: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_gather_into_tensor(whole, mine, group=group)
    return whole


def ring(mine: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank sends to the next one, as pipeline stages do."""
    got, place = whole[: len(mine)], group.rank()
    send = dist.P2POp(dist.isend, mine, group=group, group_peer=(place + 1) % group.size())
    receive = dist.P2POp(dist.irecv, got, group=group, group_peer=(place - 1) % group.size())
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return got


class Call(NamedTuple):
    """expect: from all members' values and a place in the group. share: of a member's bytes that a link carries."""

    run: Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]
    expect: Callable[[list[Tensor], int], Tensor]
    share: Callable[[int], float]


CALLS = {
    "all-reduce": Call(all_reduce, lambda every, _: torch.stack(every).sum(0), lambda size: 2 * (size - 1) / size),
    "all-gather": Call(all_gather, lambda every, _: torch.cat(every), lambda size: size - 1),
    "point to point": Call(ring, lambda every, place: every[place - 1], lambda _: 1),
}


def groups(world: World) -> str:
    """Over the TP groups (neighbours) and DP groups (at a distance) of each TP size, all groups of a kind at once:
    equal to what the CPU computes; bandwidth of the slowest rank."""
    sizes = [size for size in range(2, world.size + 1) if world.size % size == 0]
    if not sizes:
        raise Skip("one rank has no groups")
    roles = make_groups({f"TP{size}": Layout(tuple(range(world.size)), tp=size) for size in sizes}, world.rank)
    nodes, count = nodes_of(world.comm), 0
    print_head(world, "GB/s", "ranks of the first group", "nodes", *CALLS)
    for (name, role), axis in product(roles.items(), ("tp", "dp")):
        first = role.layout.groups(axis)[0]
        if len(first) > 1:
            rates = [f"{measured(world, getattr(role, axis), call):.3g}" for call in CALLS.values()]
            spread = len({nodes[rank] for rank in first})
            print_row(world, f"{axis.upper()} of {name}", " ".join(map(str, first)), spread, *rates)
            count += len(CALLS)
    return f"{count} collectives equal the CPU's values, {4 * ELEMENTS / 1e6:.2f} MB of each rank, {dist.get_backend()}"


def measured(world: World, group: dist.ProcessGroup, call: Call) -> float:
    """GB/s of a link at the slowest rank, as if bytes moved in a ring. Collective over the world."""
    members, seconds = dist.get_process_group_ranks(group), []
    whole = torch.zeros(len(members) * ELEMENTS, device=world.device)
    for _ in range(REPETITIONS):
        mine = values(world.rank).to(world.device)
        accelerator.synchronize(world.device)
        world.barrier()
        start = time.perf_counter()
        values_here = call.run(mine, whole, group)
        accelerator.synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    right = torch.equal(values_here.cpu(), call.expect([values(rank) for rank in members], members.index(world.rank)))
    wrong = [rank for rank, it in enumerate(world.all_gather_object(right)) if not it]
    require(not wrong, f"{call.run.__name__}: ranks {wrong} have other values than the CPU")
    return min(world.all_gather_object(call.share(len(members)) * 4 * ELEMENTS / median(seconds[1:]) / 1e9))


def values(rank: int) -> Tensor:
    """Integers of a rank."""
    return ((torch.arange(ELEMENTS) * (rank + 3)) % MODULUS).float()


def hang() -> None:
    """A collective of one rank behind a kernel that takes longer than the timeout."""
    start_torch(start_mpi(), nccl_timeout=TIMEOUT)
    x = torch.ones(1024, device="cuda")
    dist.all_reduce(x)  # makes the communicator
    torch.cuda.synchronize()
    started = time.monotonic()
    torch.cuda._sleep(int(HELD * CYCLES_PER_SECOND))
    dist.all_reduce(x)
    print(f"launched after {time.monotonic() - started:.1f} s", flush=True)
    torch.cuda.synchronize()
    print(f"survived for {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    hang()
