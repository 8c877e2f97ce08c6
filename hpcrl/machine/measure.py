"""`hpcrl check --job --machine FILE`: what this machine can do, measured on all ranks of a job, as a plain mapping.

The keys are those of `hpcrl.machine.machine_file.Machine`.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.machine.machine_file import crowding, ring_bandwidth, shared_cores
from hpcrl.machine.measure_rank import (
    DeviceFigures,
    best_figures,
    bus_bandwidths,
    contention,
    measure_device,
    node_network,
    pair_link,
    product_rate,
)
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

GIB = 2**30
SINGLE_SECONDS, TOGETHER_SECONDS = 0.3, 0.6
IDLE = 0.9  # of the time of its cores that a rank has if nothing else runs there
FILE_BYTES = {"cpu": 2**24, "cuda": 2**26}  # of each rank
BLOCK = 2**22
SHARED = 0.8  # of what the links of a node's ranks carry one by one; below, they share a limit


def measure(
    world: World, nodes: Sequence[Sequence[int]], folder: str, say: Callable[[str], None], rounds: int
) -> dict[str, Any]:
    """Measure the machine, and return its description. Collective.

    Args:
        nodes: the ranks of each node.
        folder: where files are written and read.
        say: called on rank 0 with a line per figure.
        rounds: number of rounds of what one rank does while others wait and all do together, of which the best count:
            whatever else the hardware does, such as another virtual machine on the second thread of a core, comes and
            goes.
    """
    show = say if world.rank == 0 else lambda line: None
    local = next(node for node in nodes if world.rank in node)
    on_cpu = world.device.type == "cpu"
    firsts, rates, waits = [], [], []
    for _ in range(rounds):
        firsts.append(_first_ranks(world, nodes))
        rates.append(_rates(world, local))
        waits.append(contention(world, local) if on_cpu else 0.0)
    single = [best_figures(its) for its in zip(*firsts, strict=True)]
    device = _device(world, single)
    for line in _device_lines(device):
        show(line)
    cores, own = _cores(world, local, rates)
    node: dict[str, Any] = {"ranks": max(map(len, nodes)), "cores": cores}
    show(f"cores              {cores:.2f} of {len(local)} ranks compute at full speed together")
    busy = ""
    if on_cpu and own < IDLE:
        busy = f"; other programs had {1 - own:.0%} of the time of a rank's cores"
        show(f"not idle           {busy[2:]}: measure again on idle nodes")
    if not on_cpu and node["cores"] > SHARED * node["ranks"]:
        node["cores"] = None
    if on_cpu and node["ranks"] > 1:
        node["contention"] = median(waits)
        show(
            f"contention         {1e6 * node['contention']:.0f} us in a collective of ranks without cores of their own"
        )
    node["host_copy"] = median(figures.host_copy for figures in single)
    show(f"host copy          {_bytes(node['host_copy'])}")
    links = _links(world, nodes, device, node["cores"])
    for line in _link_lines(links):
        show(line)
    node["network"] = _network(world, nodes, links["between"]["bandwidth"])
    if len(nodes) > 1:
        show(f"network of a node  {_bytes(node['network']) if node['network'] else 'no limit beside the links'}")
    node["write"], node["read"] = _file_system(world, nodes, folder)
    show(f"file system        written {_bytes(node['write'])}, read {_bytes(node['read'])} by a node in {folder}")
    sources = [_source(world, len(nodes)) + busy]
    return {"sources": sources, "measured": True, "device": device, "node": node, "links": links}


def _first_ranks(world: World, nodes: Sequence[Sequence[int]]) -> list[DeviceFigures]:
    """Figures of the first rank of each node, while its other ranks wait."""
    leads = any(world.rank == ranks[0] for ranks in nodes)
    gathered = world.all_gather_object(measure_device(world.device) if leads else None)
    return [figures for figures in gathered if figures is not None]


def _device(world: World, single: Sequence[DeviceFigures]) -> dict[str, Any]:
    def middle(figure: Callable[[DeviceFigures], float]) -> float:
        return median(map(figure, single))

    def rates(kind: str) -> dict[str, dict[str, float]]:
        measured = [getattr(figures, kind) for figures in single]
        medians = {dtype: map(median, zip(*(rates[dtype] for rates in measured), strict=True)) for dtype in measured[0]}
        return {dtype: {"flops": flops, "half_rows": rows} for dtype, (flops, rows) in medians.items()}

    on_gpu = world.device.type == "cuda"
    return {
        "kind": "gpu" if on_gpu else "cpu",
        "memory_gib": torch.cuda.get_device_properties(world.device).total_memory / GIB if on_gpu else None,
        "matmul": rates("matmul"),
        "attention": rates("attention"),
        "memory_bandwidth": middle(lambda figures: figures.memory_bandwidth),
        "launch": middle(lambda figures: figures.launch),
        "replay": middle(lambda figures: figures.replay or 0.0),
    }


def _rates(world: World, local: Sequence[int]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Products of the first rank of each node, and of all ranks together: by rank, see `product_rate`. Collective."""
    both = []
    for together in (False, True):
        world.barrier()
        runs = together or world.rank == local[0]
        seconds = TOGETHER_SECONDS if together else SINGLE_SECONDS
        both.append(world.all_gather_object(product_rate(world.device, seconds) if runs else (0.0, 0.0)))
    return both[0], both[1]


def _cores(world: World, local: Sequence[int], rounds: Sequence[Any]) -> tuple[float, float]:
    """(ranks of a node that compute at full speed at the same time, share of its cores' time that a rank has while the
    others wait), the least of all nodes, from the best of the rounds of `_rates`. Collective."""
    single = max(first[local[0]][0] for first, _ in rounds)
    together = max(([beside[rank][0] for rank in local] for _, beside in rounds), key=sum)
    cores = shared_cores(single, together)
    if world.device.type == "cpu":
        allowed = world.all_gather_object(os.sched_getaffinity(0))
        cores = min(cores, len(set().union(*(allowed[rank] for rank in local))) / world.threads)
    own = max(first[local[0]][1] for first, _ in rounds) / world.threads
    of_ranks = world.all_gather_object((cores, own))
    return min(cores for cores, _ in of_ranks), min(own for _, own in of_ranks)


def _links(world: World, nodes: Sequence[Sequence[int]], device: dict[str, Any], cores: float | None) -> dict[str, Any]:
    """Links inside a node and between nodes. If the job has only one kind, it stands for both; a job of one rank has
    copies within its memory instead. Shares of groups are those of ranks with cores of their own: how much longer ranks
    take that share cores is known from `cores`."""
    inside = between = None
    crowded = next((ranks for ranks in nodes if len(ranks) > 1), None)
    if crowded is not None:
        inside = pair_link(world, (crowded[0], crowded[1]))
    if len(nodes) > 1:
        between = pair_link(world, (nodes[0][0], nodes[1][0]))
    itself = (device["launch"], device["memory_bandwidth"] / 2)
    inside, between = inside or between or itself, between or inside or itself
    on_gpu = world.device.type == "cuda"
    shares = {  # keys of YAML files are text
        str(size): bandwidth * crowding(size, nodes, cores) / ring_bandwidth(size, nodes, inside[1], between[1], on_gpu)
        for size, bandwidth in bus_bandwidths(world).items()
    }
    return {"inside": _link(inside), "between": _link(between), "group": shares}


def _link(link: tuple[float, float]) -> dict[str, float]:
    return {"latency": link[0], "bandwidth": link[1]}


def _network(world: World, nodes: Sequence[Sequence[int]], link: float) -> float | None:
    """Bytes per second that the ranks of a node share; None if each of them has a link of its own. Collective."""
    if len(nodes) == 1:
        return None
    found = node_network(world, nodes[0], nodes[1])
    own = min(len(nodes[0]), len(nodes[1])) * link
    return found if found < SHARED * own else None


def _file_system(world: World, nodes: Sequence[Sequence[int]], folder: str) -> tuple[float, float]:
    """Bytes per second that a node writes to its files, with fsync, and reads back, without the node's page cache.

    All ranks of all nodes write at the same time, a file each. Collective; raises InputError on all ranks.
    """
    token = world.broadcast_object(secrets.token_hex(8))
    path = Path(folder) / f".machine_{token}_{world.rank}"
    nbytes = FILE_BYTES[world.device.type]
    try:
        seconds = []
        for action in (_write, _read):
            world.barrier()
            took = world.run_collectively(lambda action=action: _timed(action, path, nbytes))  # type: ignore[misc]
            seconds.append(world.all_gather_object(took))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    written, read = (
        median(len(ranks) * nbytes / max(times[rank] for rank in ranks) for ranks in nodes) for times in seconds
    )
    return written, read


def _timed(action: Callable[[Path, int], None], path: Path, nbytes: int) -> float:
    began = time.perf_counter()
    try:
        action(path, nbytes)
    except OSError as error:
        raise InputError(f"the file system cannot be measured: {path}: {error.strerror}; set run.dir") from None
    return time.perf_counter() - began


def _write(path: Path, nbytes: int) -> None:
    block = os.urandom(BLOCK)  # file systems may compress zeros
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // BLOCK):
            file.write(block)
        os.fsync(file.fileno())


def _read(path: Path, nbytes: int) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(BLOCK):
            pass


def _source(world: World, nodes: int) -> str:
    """What was measured, for the file."""
    what = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else _cpu_name()
    return (
        f"measured by `hpcrl check --job --machine` on {date.today()}: {world.size} rank(s) on {nodes} node(s), "
        f"{what}, {world.threads} thread(s) per rank, torch {torch.__version__}"
    )


def _cpu_name(path: str = "/proc/cpuinfo") -> str:
    with suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _device_lines(device: dict[str, Any]) -> list[str]:
    lines = [
        f"{f'{kind} {dtype}':<18} {rate['flops'] / 1e9:,.2f} GFLOP/s, half of it with {rate['half_rows']:.1f} rows"
        for kind in ("matmul", "attention")
        for dtype, rate in device[kind].items()
    ]
    lines.append(f"memory             {_bytes(device['memory_bandwidth'])} read and written")
    replayed = f", {1e6 * device['replay']:.2f} us in a CUDA graph" if device["replay"] else ""
    return [*lines, f"launch             {1e6 * device['launch']:.2f} us per operator{replayed}"]


def _link_lines(links: dict[str, Any]) -> list[str]:
    lines = [
        f"link {name:<13} {1e6 * links[name]['latency']:.1f} us, {_bytes(links[name]['bandwidth'])}"
        for name in ("inside", "between")
    ]
    return lines + [
        f"all-reduce of {size:<4} {share:.2f} of the link's bandwidth" for size, share in links["group"].items()
    ]


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
