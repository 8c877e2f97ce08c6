"""CPUs of a rank: the number of its threads, and its binding to CPUs near its GPU.

Copies between host and device then stay within a NUMA node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.runtime.mpi import all_gather_object
from hpcrl.sandbox import fork_server

if TYPE_CHECKING:
    from mpi4py import MPI

Core = tuple[int, ...]  # its CPUs: one for each hardware thread


def bind_near_gpu(node: MPI.Intracomm, pci_id: str) -> list[int] | None:
    """Bind this process to CPUs near the GPU with this PCI id and return them. Collective over the ranks of `node`.

    Returns None and binds nothing if the launcher has bound any of these ranks, or if sysfs does not list the CPUs.
    """
    everyone = all_gather_object(node, (is_bound(os.sched_getaffinity(0), online_cpus()), cores_near(pci_id)))
    if any(bound for bound, _ in everyone):
        return None
    cpus = share([cores for _, cores in everyone], node.rank)
    if cpus:
        bind(cpus)
    return cpus or None


def share(cores: Sequence[Sequence[Core]], rank: int) -> list[int]:
    """The CPUs of `rank`. `cores`: the cores near the GPU of each rank of the node.

    Ranks with the same cores divide them in rank order, as evenly as possible; a core is not divided. Empty if there
    are fewer cores than ranks.
    """
    mine = list(cores[rank])
    sharers = [other for other, theirs in enumerate(cores) if list(theirs) == mine]
    if len(mine) < len(sharers):
        return []
    place = sharers.index(rank)
    first, end = (len(mine) * at // len(sharers) for at in (place, place + 1))
    return sorted(cpu for core in mine[first:end] for cpu in core)


def is_bound(allowed: Iterable[int], online: Iterable[int]) -> bool:
    """Whether a process is bound to a part of the CPUs. It counts as bound if `online` is empty."""
    return set(allowed) != set(online)


def parse_cpu_list(text: str) -> list[int]:
    """Convert '0-2,8', the kernel's format, to [0, 1, 2, 8]."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Sequence[int]) -> str:
    """Convert [0, 1, 2, 8] to '0-2,8'."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def cores_near(pci_id: str, sysfs: str = "/sys") -> list[Core]:
    """Cores near a PCI device such as 0000:17:00.0, in the order of their first CPUs; [] if sysfs has none."""
    cpus = read_cpu_list(Path(sysfs, "bus/pci/devices", pci_id, "local_cpulist"))
    cores: dict[Core, None] = {}
    for cpu in cpus:
        siblings = read_cpu_list(Path(sysfs, f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores[tuple(each for each in siblings if each in cpus) or (cpu,)] = None
    return list(cores)


def online_cpus(sysfs: str = "/sys") -> list[int]:
    return read_cpu_list(Path(sysfs, "devices/system/cpu/online"))


def read_cpu_list(path: Path) -> list[int]:
    try:
        return parse_cpu_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []


def bind(cpus: Sequence[int]) -> None:
    """Bind all threads of this process, and the child processes that it starts from now on."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            pass  # it has ended
    fork_server.bind(cpus)


def rank_threads(environ: Mapping[str, str], cores: int, local_size: int) -> int:
    """Number of threads of a rank: OMP_NUM_THREADS, or an even share of the cores that it may use.

    Under `srun --cpus-per-task` with binding, each rank sees only its own cores. Without binding, the ranks of a node
    all see the node's cores.
    """
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    bound = environ.get("SLURM_CPUS_PER_TASK", "")
    if bound.isdigit() and cores == int(bound):
        return cores
    return max(1, cores // local_size)
