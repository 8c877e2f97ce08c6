"""`hpcrl check --job`: whether the nodes and links of an allocation can run a job, in less than a minute.

Runs on all ranks of the job, under srun or mpiexec like the job. If nothing is wrong, torch is started as in the job,
the fabric is measured and NCCL's log read, and the table has the addresses where the processes listen. The exit code is
1 if something is wrong. With --machine it also measures the machine, if nothing is wrong with it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from hpcrl.machine import fabric
from hpcrl.machine.check import GIB, Finding, report, start_mpi_or_exit
from hpcrl.machine.fabric import NcclLog, error_advice, joined, nccl_versions, parse_log
from hpcrl.machine.facts import Facts, GpuClock, find_facts, gpu_clock
from hpcrl.observe.trace.records import ClockAligner
from hpcrl.runtime import exits, gpus
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import BESIDE_NCCL, asks_for_gpu_support, is_cray, launched_rank, library_name, node_name
from hpcrl.runtime.mpi import all_gather_object, barrier, broadcast_object, run_collectively, wait, wait_all
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.sockets import Listener, OpenedSockets, grouped
from hpcrl.runtime.watchdog import format_ranks
from hpcrl.runtime.world import World, abort, finish, finish_with_error, set_torch_precision, start_torch

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T", bound=Hashable)
Pair = tuple[int, int]  # of nodes

PINGS = 20
MESSAGE = 4 * 2**20  # bytes
MESSAGES = 8  # the fastest one counts; the first one also connects
SLOW = 2.0  # times slower than the median
LATE = 5.0  # times the median latency, because small messages vary much more


def ring_latencies(comm: MPI.Intracomm) -> list[float]:
    """Seconds that a small message takes from each rank to the next one, from the last one to rank 0. Collective.

    Links that share a rank are measured one after the other.
    """
    mine, size = 0.0, comm.size
    if size == 1:
        return []
    for turn in range(3):
        for link in (comm.rank, (comm.rank - 1) % size):
            if turn == (2 if size % 2 and link == size - 1 else link % 2):
                if link == comm.rank:
                    mine = _ping(comm, (link + 1) % size) / 2
                else:
                    _answer(comm, link)
        barrier(comm)
    return all_gather_object(comm, mine)


def pair_bandwidths(comm: MPI.Intracomm, nodes: Sequence[int]) -> dict[Pair, float]:
    """Bytes per second in each direction, with both in use, between pairs of the ranks `nodes`, one of each node.

    The keys are pairs of indices into `nodes`. Disjoint pairs are measured at the same time. Collective over `comm`.
    """
    mine: dict[Pair, float] = {}
    for pairs in rounds(len(nodes)):
        for pair in pairs:
            ranks = [nodes[place] for place in pair]
            if comm.rank in ranks:
                mine[pair] = _bandwidth(comm, ranks[1] if comm.rank == ranks[0] else ranks[0])
    slowest: dict[Pair, float] = {}
    for part in all_gather_object(comm, mine):
        slowest |= {pair: min(speed, slowest.get(pair, speed)) for pair, speed in part.items()}
    return slowest


def _ping(comm: MPI.Intracomm, peer: int) -> float:
    """Seconds of the shortest round trip."""
    sent, answer, best = np.zeros(1), np.zeros(1), np.inf
    for _ in range(PINGS):
        began = time.perf_counter()
        wait_all([comm.Isend(sent, dest=peer), comm.Irecv(answer, source=peer)])
        best = min(best, time.perf_counter() - began)
    return best


def _answer(comm: MPI.Intracomm, peer: int) -> None:
    received = np.zeros(1)
    for _ in range(PINGS):
        wait(comm.Irecv(received, source=peer))
        wait(comm.Isend(received, dest=peer))


def _bandwidth(comm: MPI.Intracomm, peer: int) -> float:
    out, into, best = np.zeros(MESSAGE, np.uint8), np.empty(MESSAGE, np.uint8), np.inf
    for _ in range(MESSAGES):
        wait_all([comm.Isend(out[:1], dest=peer), comm.Irecv(into[:1], source=peer)])  # both are here
        began = time.perf_counter()
        wait_all([comm.Isend(out, dest=peer), comm.Irecv(into, source=peer)])
        best = min(best, time.perf_counter() - began)
    return MESSAGE / best


def rounds(count: int) -> list[list[Pair]]:
    """All pairs of `count` nodes, in rounds of disjoint pairs: count - 1 rounds, or count if it is odd.

    The circle method of round-robin tournaments: one node stays, the others rotate by one place between rounds.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    all_rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        all_rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return all_rounds


def deviants(values: Sequence[T]) -> tuple[T, list[int]]:
    """The most common value, the first of equally common ones, and the indices of other values."""
    common = Counter(values).most_common(1)[0][0]
    return common, [index for index, value in enumerate(values) if value != common]


def slow_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[int]:
    """Nodes that are slow with every partner. Needs three nodes: of two, either may be the slow one."""
    if count < 3:
        return []
    best = best_of_nodes(bandwidth, count)
    return [node for node in range(count) if best[node] < median(best) / SLOW]


def slow_pairs(bandwidth: Mapping[Pair, float], count: int) -> list[Pair]:
    """Slow pairs of nodes that are both fast with other nodes."""
    best = best_of_nodes(bandwidth, count)
    return [pair for pair, speed in bandwidth.items() if speed < min(best[pair[0]], best[pair[1]]) / SLOW]


def best_of_nodes(bandwidth: Mapping[Pair, float], count: int) -> list[float]:
    """Bandwidth of each node with its fastest partner."""
    return [max((speed for pair, speed in bandwidth.items() if node in pair), default=0.0) for node in range(count)]


def late_links(seconds: Sequence[float], kinds: Sequence[bool]) -> list[int]:
    """Links whose latency is far above the median of their kind (inside a node, between nodes)."""
    usual = {kind: median(s for s, other in zip(seconds, kinds, strict=True) if other == kind) for kind in set(kinds)}
    return [link for link, kind in enumerate(kinds) if seconds[link] > LATE * usual[kind]]


DEADLINE = 60.0  # seconds, without the check of the bundle, which may be large, and without starting torch
MEASURING_DEADLINE = 300.0  # seconds
CLOCKS_DIFFER, CLOCKS_WRONG = 1.0, 60.0  # seconds
CANARY_SECONDS = 10.0


@dataclass(frozen=True)
class Node:
    """A node of the job. ranks: the job's ranks on it; the first one measures links and clock."""

    host: str
    ranks: list[int]

    def __str__(self) -> str:
        return f"{self.host} ({format_ranks(self.ranks)})"


@dataclass(frozen=True)
class Links:
    """Measurements between ranks.

    latencies: seconds, from each rank to the next. bandwidth: bytes/s, of pairs of nodes. offsets: seconds, of the
    nodes' clocks.
    """

    latencies: list[float]
    bandwidth: dict[Pair, float]
    offsets: list[float]


@dataclass(frozen=True)
class Folder:
    """The run directory on rank 0. unseen: ranks that did not find the file that rank 0 wrote."""

    path: str
    free: int
    wrong: str | None
    unseen: list[int]


def main(
    find_job: Callable[[], tuple[str, str]],
    verify: Callable[[str], list[str]],
    save_machine: Callable[[dict[str, Any]], str] | None = None,
    rounds: int = 3,
) -> NoReturn:
    """Run the subcommand. Collective over the ranks that the launcher started.

    Args:
        find_job: returns the run directory, which may be relative and need not exist, and the backend of
            torch.distributed, on rank 0.
        verify: returns what is wrong with the files of a bundle.
        save_machine: with --machine, writes the description of the machine on rank 0, and returns the file's name; what
            changes with what else the hardware does is measured in so many `rounds`.
    """
    status = RankStatus(phase="starting MPI")
    timer = _start_timer(status, DEADLINE)
    opened = OpenedSockets()
    comm = start_mpi_or_exit()
    try:
        finish(_run(comm, status, timer, opened, find_job, verify, save_machine, rounds))
    except BaseException as error:  # the others would wait for this rank
        abort(error, rank=comm.rank, phase=status.phase)


def _run(
    comm: MPI.Intracomm,
    status: RankStatus,
    timer: threading.Timer,
    opened: OpenedSockets,
    find_job: Callable[[], tuple[str, str]],
    verify: Callable[[str], list[str]],
    save_machine: Callable[[dict[str, Any]], str] | None,
    rounds: int,
) -> int:
    """Run the checks and return the exit code on every rank. `timer` is cancelled after all steps that may hang."""
    from mpi4py import MPI

    stage = partial(status.within, "check")
    folder, backend, expected = _agreed_job(comm, find_job)

    with stage("looking at versions and folders"):
        facts = all_gather_object(comm, find_facts(MPI.Get_library_version()))
    nodes = nodes_of([fact.host for fact in facts])
    first = [node.ranks[0] for node in nodes]
    with stage("pinging the next rank"):
        latencies = ring_latencies(comm)
    with stage("sending between pairs of nodes"):
        bandwidth = pair_bandwidths(comm, first)
    with stage("comparing clocks with rank 0"):
        offsets = all_gather_object(comm, ClockAligner(comm, time.time).measure().offset)
        links = Links(latencies, bandwidth, [offsets[rank] for rank in first])
    with stage("writing to the shared folder"):
        shared = _try_folder(comm, folder)
    timer.cancel()
    table = []
    if comm.rank == 0:
        table = [
            *world_findings(os.environ, comm.size, MPI.Get_library_version(), len(nodes)),
            *gpu_support_findings(os.environ, MPI.Get_library_version()),
            *node_findings(nodes, facts, links),
            *link_findings(nodes, links),
            *fabric.state_findings(
                [node.host for node in nodes],
                [facts[rank].state for rank in first],
                [len(node.ranks) for node in nodes],
            ),
            folder_finding(nodes, shared),
            *version_findings(nodes, [fact.versions for fact in facts]),
            *bundle_findings(shared.path, verify),
        ]
    world = None
    if not broadcast_object(comm, any(finding.wrong is not None and finding.needed for finding in table)):
        opened.note("MPI")
        timer = _start_timer(status, MEASURING_DEADLINE)
        with tempfile.TemporaryDirectory(prefix="hpcrl_nccl_") as logs:
            log = Path(logs, "nccl.log")
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH", NCCL_DEBUG_FILE=str(log))
            with stage("starting torch"), _explained(log):
                try:
                    world = start_torch(comm, backend, status=status, nccl_timeout=MEASURING_DEADLINE)
                    note_torch(opened)
                except InputError as error:
                    if not error.everywhere:
                        raise
                    table.append(Finding("torch", "does not start", str(error)))
            if world is not None:
                with stage("measuring the fabric"), _explained(log):
                    table += _fabric_findings(world, nodes, facts, expected, log)
        timer.cancel()
        table += listener_findings(nodes, [one for own in all_gather_object(comm, opened.all()) for one in own])
    code = int(broadcast_object(comm, report(table, "a job on these nodes") if comm.rank == 0 else None))
    if save_machine is not None and world is not None:
        _measure(world, status, [node.ranks for node in nodes], shared.path, save_machine, rounds)
    elif save_machine is not None and comm.rank == 0:
        print("the machine is not measured, because something is wrong with it")
    return code


@contextmanager
def _explained(log: Path) -> Iterator[None]:
    """Context in which an error of NCCL, of which torch says little, becomes one line if NCCL's log has the reason."""
    try:
        yield
    except RuntimeError as error:
        if advice := error_advice(_read_log(log)):
            raise InputError(advice) from error
        raise


def _read_log(path: Path, node_of: Sequence[int] = ()) -> NcclLog:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return parse_log(text, node_of)


def _fabric_findings(
    world: World, nodes: Sequence[Node], facts: Sequence[Facts], expected: fabric.Expected, log: Path
) -> list[Finding]:
    """Measure bandwidth, and read what NCCL says about it. The findings are on rank 0. Collective."""
    from hpcrl.machine.measure_rank import all_reduce_bandwidth, pair_link

    node_of = {rank: number for number, node in enumerate(nodes) for rank in node.ranks}
    pair = (0, nodes[1].ranks[0] if len(nodes) > 1 else 1)
    all_reduce = all_reduce_bandwidth(world, world.size) if world.size > 1 else 0.0
    # before a pair of ranks makes a communicator with numbers of its own
    mine = _read_log(log, [node_of[rank] for rank in range(world.size)])
    point_to_point = pair_link(world, pair)[1] if world.size > 1 else 0.0
    logs, clocks = zip(*world.all_gather_object((mine, _clock(world))), strict=True)
    if world.rank != 0:
        return []
    table: list[Finding] = []
    if world.nccl_timeout is not None:
        adapters = facts[0].state.adapters
        table += fabric.network_findings(joined(logs), adapters, expected.net, os.environ, len(nodes))
        table += version_findings(nodes, [nccl_versions(log) for log in logs])
    if world.size > 1:
        table += fabric.rate_findings(expected, fabric.Rates(all_reduce, point_to_point, pair), world.size)
    return [*table, *fabric.clock_findings([fact.host for fact in facts], clocks)]


def _clock(world: World) -> GpuClock | None:
    if world.device.type != "cuda":
        return None
    import torch

    return gpu_clock(gpus.pci_id(torch.cuda.get_device_properties(world.device)))


def note_torch(opened: OpenedSockets) -> None:
    """Note what torch.distributed has opened."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    opened.note("torch's store", (store.host, store.port))
    backends = {part.split(":")[1] for part in dist.get_backend_config().split(",")}
    opened.note(" and ".join(sorted(backends)))


def _measure(
    world: World,
    status: RankStatus,
    nodes: Sequence[Sequence[int]],
    folder: str,
    save: Callable[[dict[str, Any]], str],
    rounds: int,
) -> None:
    """Measure the machine and save its description. Ends the job if that cannot be done. Collective."""
    from hpcrl.machine.measure import measure

    timer = _start_timer(status, MEASURING_DEADLINE * max(1, rounds // 3))
    try:
        set_torch_precision(full_determinism=False)
        if world.rank == 0:
            print(f"\nmeasuring on {world.size} rank(s), {world.threads} thread(s) per rank", flush=True)
        with status.within("check", "measuring"):
            figures = measure(world, nodes, folder, partial(print, flush=True), rounds)
        path = run_collectively(world.comm, lambda: save(figures) if world.rank == 0 else None)
    except InputError as error:
        finish_with_error(error, world.rank)
    timer.cancel()
    if world.rank == 0:
        print(f"\nwritten to {path}", flush=True)


def nodes_of(hosts: Sequence[str]) -> list[Node]:
    """The nodes in the order of their first ranks."""
    return [Node(host, [rank for rank, other in enumerate(hosts) if other == host]) for host in dict.fromkeys(hosts)]


def world_findings(environ: Mapping[str, str], size: int, library: str, num_nodes: int) -> Iterator[Finding]:
    wrong, needed = None, True
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        count = environ.get(name, "")
        if count.isdigit() and int(count) != size:
            wrong = f"{name}={count}, but MPI's world has {size} ranks: check --mpi of srun, and --ntasks"
            needed = name != "SLURM_NTASKS"  # an mpiexec inside the allocation may use fewer tasks
            break
    yield Finding(
        "world", f"{size} rank{'s' * (size > 1)} on {num_nodes} node(s), {library_name(library)}", wrong, needed
    )


def gpu_support_findings(environ: Mapping[str, str], library: str) -> Iterator[Finding]:
    if is_cray(library) and asks_for_gpu_support(environ):
        yield Finding("GPU-aware MPI", "enabled", BESIDE_NCCL, needed=False)


def node_findings(nodes: Sequence[Node], facts: Sequence[Facts], links: Links) -> Iterator[Finding]:
    """A line for each node, with what is wrong with it."""
    best, slow = best_of_nodes(links.bandwidth, len(nodes)), slow_nodes(links.bandwidth, len(nodes))
    for place, node in enumerate(nodes):
        fact, offset = facts[node.ranks[0]], links.offsets[place]
        cells = [format_ranks(node.ranks), fact.address, f"clock {1e3 * offset:+.1f} ms"]
        if len(nodes) > 1:
            cells.append(f"{best[place] / 1e9:.2f} GB/s")
        cells.append(f"{fact.scratch_free / GIB:.1f} GiB free in {fact.scratch}")
        wrong, needed = None, True
        if fact.no_address is not None and len(nodes) > 1:
            wrong = fact.no_address
        elif place in slow:
            wrong = f"slow to and from every other node ({best[place] / 1e9:.2f} GB/s); try --exclude={node.host}"
        elif abs(offset) > CLOCKS_DIFFER:
            wrong, needed = f"its clock is {offset:+.1f} s off rank 0's", abs(offset) > CLOCKS_WRONG
        yield Finding(f"  {node.host}", ", ".join(cells), wrong, needed)


def link_findings(nodes: Sequence[Node], links: Links) -> Iterator[Finding]:
    """The slowest links and their end points."""
    host = {rank: node.host for node in nodes for rank in node.ranks}
    if links.latencies:
        size = len(links.latencies)
        ends = [
            f"rank {rank} on {host[rank]} to {(rank + 1) % size} on {host[(rank + 1) % size]}" for rank in range(size)
        ]
        slowest = max(range(size), key=links.latencies.__getitem__)
        late = late_links(links.latencies, [host[rank] == host[(rank + 1) % size] for rank in range(size)])
        wrong = "far above the others: " + "; ".join(ends[link] for link in late) if late else None
        yield Finding("ping", f"{1e6 * links.latencies[slowest]:.1f} us at most, {ends[slowest]}", wrong, False)
    if links.bandwidth:
        pair = min(links.bandwidth, key=links.bandwidth.__getitem__)
        slow = [_pair(nodes, other) for other in slow_pairs(links.bandwidth, len(nodes))]
        wrong = f"{len(slow)} slow though the nodes are fast with others: {', '.join(slow[:5])}" if slow else None
        yield Finding("pairs", f"{links.bandwidth[pair] / 1e9:.2f} GB/s at least, {_pair(nodes, pair)}", wrong, False)


def folder_finding(nodes: Sequence[Node], folder: Folder) -> Finding:
    wrong, needed = folder.wrong, True
    if folder.unseen:
        blind = ", ".join(map(str, _some_of(nodes, folder.unseen)))
        wrong = (
            f"what rank 0 wrote there was not seen within {CANARY_SECONDS:.0f} s on {blind}: put run.dir on a file "
            "system that all nodes share, and start all ranks in the same folder"
        )
    elif wrong is None and folder.free < GIB:
        wrong, needed = "less than 1 GiB for checkpoints", False
    return Finding("shared folder", f"{folder.path}, {folder.free / GIB:.1f} GiB free", wrong, needed)


def version_findings(nodes: Sequence[Node], versions: Sequence[Mapping[str, str | None]]) -> Iterator[Finding]:
    """Versions that must be the same on all ranks: a line for each that differs, and one for all that do not."""
    equal = []
    for name in versions[0]:
        common, others = deviants([own[name] for own in versions])
        if not others:
            equal += [f"{name} {common}"] if common else []
            continue
        deviations = [f"{versions[node.ranks[0]][name] or 'none'} on {node}" for node in _some_of(nodes, others)]
        wrong = f"{', '.join(deviations)}; the others have {common or 'none'}"
        yield Finding(name, "not the same everywhere", wrong)
    yield Finding("the same", ", ".join(equal))


def listener_findings(nodes: Sequence[Node], listeners: Sequence[Listener]) -> Iterator[Finding]:
    """A line for each node and address where processes of the job listen, by what has opened the sockets."""
    for group in grouped(listeners):
        wrong = None
        if len(nodes) == 1 and not group.is_loopback:
            wrong = f"{group.owner} listens for other nodes too, though the job is on one; see docs/security.md"
        yield Finding("listens", str(group), wrong, needed=False)
    yield Finding("listens", "rank 0, until all ranks are connected")


def bundle_findings(folder: str, verify: Callable[[str], list[str]]) -> Iterator[Finding]:
    """The bundle that `hpcrl submit` has put into the run directory."""
    bundle = Path(folder) / "bundle"
    if (bundle / "manifest.json").exists():
        began = time.perf_counter()
        problems = verify(str(bundle))
        took = time.perf_counter() - began
        wrong = f"{'; '.join(problems[:5])}; submit again" if problems else None
        yield Finding("bundle", f"{bundle}, checked in {took:.1f} s", wrong)


def _agreed_job(comm: MPI.Intracomm, find_job: Callable[[], tuple[str, str]]) -> tuple[str, str, fabric.Expected]:
    """The run directory, or its nearest parent that exists, relative if the configuration has a relative path; the
    backend of torch.distributed; and what the site's profile expects."""

    def look() -> tuple[str, str, fabric.Expected]:
        folder, backend = find_job() if comm.rank == 0 else ("", "")
        while not os.path.isdir(folder or "."):
            folder = os.path.dirname(folder)
        return folder, backend, fabric.read_expected(os.environ if comm.rank == 0 else {})

    try:
        job: tuple[str, str, fabric.Expected] = broadcast_object(comm, run_collectively(comm, look))
    except InputError as error:
        finish_with_error(error, comm.rank)
    return job


def _try_folder(comm: MPI.Intracomm, folder: str) -> Folder:
    """Write a file on rank 0, and look for it on every rank, relative to its own working directory."""
    path = os.path.abspath(folder)
    token, wrong = secrets.token_hex(8), None
    if comm.rank == 0:
        try:
            canary_path(path, token).write_text(token, encoding="utf-8")
        except OSError as error:
            wrong = f"cannot be written to ({error.strerror})"
    token, wrong = broadcast_object(comm, (token, wrong))
    seen = all_gather_object(comm, wrong is not None or see_canary(path, token))
    if comm.rank == 0:
        canary_path(path, token).unlink(missing_ok=True)
    free = shutil.disk_usage(path).free if comm.rank == 0 else 0  # other nodes may not have that folder
    return Folder(path, free, wrong, [rank for rank, saw in enumerate(seen) if not saw])


def _some_of(nodes: Sequence[Node], ranks: Sequence[int]) -> list[Node]:
    """The nodes of `ranks`, with only these ranks."""
    return [Node(node.host, own) for node in nodes if (own := [rank for rank in node.ranks if rank in ranks])]


def _pair(nodes: Sequence[Node], pair: Pair) -> str:
    return f"{nodes[pair[0]].host} and {nodes[pair[1]].host}"


def _start_timer(status: RankStatus, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, _give_up, (status, seconds))
    timer.daemon = True
    timer.start()
    return timer


def _give_up(status: RankStatus, seconds: float) -> NoReturn:
    """End the job when a dead link makes MPI wait forever. Every rank prints the step that it is in."""
    rank = launched_rank(os.environ) or "?"
    os.write(2, f"hpcrl check: rank {rank} on {node_name()} is still {status.phase} after {seconds:.0f} s\n".encode())
    time.sleep(1.0)  # launchers drop output that is still in their pipes when the first rank exits
    os._exit(exits.OTHER)


def see_canary(folder: str, token: str, timeout: float = CANARY_SECONDS) -> bool:
    """Whether the file is visible here, with its content, within `timeout` seconds: caches of nodes may delay it."""
    give_up = time.monotonic() + timeout
    while True:
        try:
            if canary_path(folder, token).read_text(encoding="utf-8") == token:
                return True
        except OSError:
            pass
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)


def canary_path(folder: str, token: str) -> Path:
    return Path(folder) / f".canary_{token}"
