"""What is wrong with the fabric of a job: network in use, settings of libfabric, bandwidth, limits and clocks of nodes.

Pure functions of NCCL's logs, the environment, what a site's profile expects, and what each node has. Settings of
Slingshot are those of two public guides, of CSCS (cscs-docs, communication/nccl, August 2026) and of HPE
(shs-ccl-docs, nccl_tuning_guide, April 2026).

NCCL and RCCL write their log with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH. The formats were read from the
sources of NCCL 2.21.5, 2.22.3, 2.27.7 and 2.30.7, of RCCL 2.21.5 and of aws-ofi-nccl 1.9.2, 1.14.2 and 1.21, and from
logs in public issues; they were not run on several GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcrl.machine.check import GIB, Finding, shared_memory_finding
from hpcrl.machine.facts import GpuClock, NodeState
from hpcrl.runtime.exits import InputError

MESSAGE = re.compile(r"NCCL (INFO|WARN) (.*)")
CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[\w+\])? via (.+?)(?: comm \w+ nRanks \d+)?$"
)
FIELDS = {
    "version": re.compile(r"\b[NR]CCL version\s*:?\s*([\w.+-]+)"),
    "network": re.compile(r"Using network (.+)"),
    "plugin": re.compile(
        r"(aws-ofi-\w+ \S+)$|Loaded net plugin (.+)|Successfully loaded external (?:network )?plugin (.+)"
    ),
    "libfabric": re.compile(r"NET/OFI Using Libfabric version ([\d.]+)"),
    "provider": re.compile(r"NET/OFI Selected [Pp]rovider is ([^,\s(]+)"),
}
NO_GPU_DIRECT = re.compile(r"GPU Direct RDMA Disabled for HCA")  # by the driver; for a GPU it is by distance


@dataclass(frozen=True)
class NcclLog:
    """What a rank's log says, None where it says nothing.

    network: NCCL's name of it: Socket, IB, AWS Libfabric, ... libfabric: version that the plugin uses. provider: of
    libfabric. inside, between: connections by transport, to ranks of the same node and of others.
    """

    version: str | None = None
    network: str | None = None
    plugin: str | None = None
    libfabric: str | None = None
    provider: str | None = None
    inside: Counter[str] = field(default_factory=Counter)
    between: Counter[str] = field(default_factory=Counter)
    driver_has_gpu_direct: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def uses_tcp(self) -> bool:
        """Whether it is TCP that connects nodes: NVLink between nodes (MNNVL) needs no network."""
        is_tcp = self.network == "Socket" or (self.provider or "").split(";")[0] in ("tcp", "sockets", "udp")
        return is_tcp and (not self.between or any(kind.startswith("NET/") for kind in self.between))


def parse_log(text: str, node_of: Sequence[int] = ()) -> NcclLog:
    """Parse the log of a rank whose only communicator is the world's.

    Args:
        node_of: the node of each rank.
    """
    messages = [match.groups() for line in text.splitlines() if (match := MESSAGE.search(line))]
    fields: dict[str, str] = {}
    links = {True: Counter[str](), False: Counter[str]()}  # by whether the ranks are on one node
    for _, message in messages:
        for name, pattern in FIELDS.items():
            if match := pattern.search(message):
                fields[name] = next(filter(None, match.groups())).strip()
        if (match := CHANNEL.match(message)) and max(ends := (int(match[1]), int(match[2]))) < len(node_of):
            links[node_of[ends[0]] == node_of[ends[1]]][transport(match[3])] += 1
    warnings = tuple(dict.fromkeys(message for level, message in messages if level == "WARN"))
    disabled = any(NO_GPU_DIRECT.search(message) for _, message in messages)
    return NcclLog(
        **fields, inside=links[True], between=links[False], driver_has_gpu_direct=not disabled, warnings=warnings
    )


def transport(via: str) -> str:
    """Kind of a connection: without devices, NET/AWS Libfabric/0(2)/GDRDMA/Shared is NET/AWS Libfabric/GDRDMA."""
    return "/".join(via.split("/")[:2] + (["GDRDMA"] if "/GDRDMA" in via else []))


def joined(logs: Sequence[NcclLog]) -> NcclLog:
    """One log of all ranks: fields of the first rank, and the connections and warnings of all."""
    return replace(
        logs[0],
        inside=sum((log.inside for log in logs), Counter[str]()),
        between=sum((log.between for log in logs), Counter[str]()),
        driver_has_gpu_direct=all(log.driver_has_gpu_direct for log in logs),
        warnings=tuple(dict.fromkeys(warning for log in logs for warning in log.warnings)),
    )


def nccl_versions(log: NcclLog) -> dict[str, str | None]:
    """What must be the same on all ranks."""
    return {
        "NCCL": log.version,
        "NCCL's network": log.network,
        "NCCL's plugin": log.plugin,
        "NCCL's libfabric": log.libfabric,
        "NCCL's provider": log.provider,
    }


def error_advice(log: NcclLog) -> str | None:
    """The reason of an error of NCCL and what to do; None if its log has no reason."""
    if not log.warnings:
        return None
    missing = any("not found" in warning or "any NET plugin" in warning for warning in log.warnings)
    advice = "put the folder of the plugin libnccl-net.so into LD_LIBRARY_PATH, or `unset NCCL_NET NCCL_NET_PLUGIN`"
    return f"NCCL failed: {log.warnings[-1].rstrip('.')}{f'; {advice}' if missing else ''}"


@dataclass(frozen=True)
class Expected:
    """What a site's profile expects: NCCL's network, and bytes per second of a GPU."""

    net: str | None = None
    all_reduce: float | None = None
    point_to_point: float | None = None


def read_expected(environ: Mapping[str, str]) -> Expected:
    """From HPCRL_FABRIC_*, which batch scripts export; rates are in GB/s there. Raises InputError."""

    def rate(name: str) -> float | None:
        text = environ.get(name, "")
        try:
            return float(text) * 1e9 if text else None
        except ValueError:
            raise InputError(f"found {name}={text}; expected GB/s, such as 20.5; correct the site file") from None

    rates = [rate(f"HPCRL_FABRIC_{what}") for what in ("ALL_REDUCE", "POINT_TO_POINT")]
    return Expected(environ.get("HPCRL_FABRIC_NET") or None, *rates)


LIBFABRIC = ("aws libfabric", "libfabric", "ofi")  # names of one plugin: its version and NCCL_NET say which


def same_network(found: str, expected: str) -> bool:
    """Whether two of NCCL's names are the same network. NVIDIA's plugins for InfiniBand are IBext*."""
    names = [name.lower() for name in (found, expected)]
    return any(all(test(name) for name in names) for test in (LIBFABRIC.__contains__, _is_ib, names[0].__eq__))


def _is_ib(name: str) -> bool:
    return name == "ib" or name.startswith("ibext")


def network_findings(
    log: NcclLog, adapters: Sequence[str], expected: str | None, environ: Mapping[str, str], num_nodes: int
) -> Iterator[Finding]:
    """Findings about NCCL's network.

    Args:
        adapters: the adapters of a node.
        expected: the network that the site's profile expects.
    """
    yield network_finding(log, adapters, expected, environ, num_nodes)
    yield from gpu_direct_findings(log)
    if log.warnings:
        yield Finding("NCCL's warnings", str(len(log.warnings)), "; ".join(log.warnings[:3]), needed=False)
    if num_nodes > 1 and ("cxi" in adapters or log.provider == "cxi"):
        yield from slingshot_findings(environ)


def network_finding(
    log: NcclLog, adapters: Sequence[str], expected: str | None, environ: Mapping[str, str], num_nodes: int
) -> Finding:
    """The network between nodes: another one than expected is wrong; TCP beside a faster adapter is a note."""
    network = log.network or "none in the log"
    used = ", ".join(filter(None, (log.plugin, log.provider and f"provider {log.provider}")))
    places = (("between nodes", log.between), ("on a node", log.inside))
    links = [f"{where} {', '.join(sorted(kinds))}" for where, kinds in places if kinds]
    description = "; ".join([f"{network} ({used})" if used else network, *links])
    other = expected is not None and not same_network(network, expected)
    if num_nodes == 1 or not (other or (log.uses_tcp and adapters)):
        return Finding("network", description)
    uses = "TCP" if log.uses_tcp else network
    why = f"the site file expects {expected}" if other else f"there is a faster network ({adapters[0]})"
    wrong = f"NCCL uses {uses} between nodes, and {why}; {_use_network(log, adapters, expected, environ)}"
    return Finding("network", description, wrong, needed=other)


def _use_network(log: NcclLog, adapters: Sequence[str], expected: str | None, environ: Mapping[str, str]) -> str:
    """The line to add, with which NCCL takes the network, or fails."""
    if log.provider and log.uses_tcp and adapters[:1] in (("cxi",), ("efa",)):
        return f"the plugin has another libfabric than the system's: `export FI_PROVIDER={adapters[0]}`, and load it"
    if adapters[:1] == ("ib",) and environ.get("NCCL_IB_DISABLE", "0") != "0":
        return "`export NCCL_IB_DISABLE=0`"
    network = expected or ("IB" if adapters[0] == "ib" else "AWS Libfabric")
    plugin = network.lower() in LIBFABRIC
    return f'`export NCCL_NET="{network}"`{", with its plugin libnccl-net.so in LD_LIBRARY_PATH" if plugin else ""}'


def gpu_direct_findings(log: NcclLog) -> Iterator[Finding]:
    """GPUDirect RDMA between nodes; nothing if no network, or TCP, is used between nodes."""
    connections = {kind: count for kind, count in log.between.items() if kind.startswith("NET/")}
    if log.uses_tcp or not connections:
        return
    direct = sum(count for kind, count in connections.items() if kind.endswith("/GDRDMA"))
    line = "`export NCCL_NET_GDR_LEVEL=PHB`, or SYS if GPU and adapter are on different sockets"
    if not log.driver_has_gpu_direct:
        line = "the driver has no GPUDirect RDMA: the site can load nvidia-peermem (`modprobe nvidia-peermem`)"
    wrong = None if direct else f"messages between nodes pass through host memory; {line}"
    yield Finding(
        "GPUDirect", f"{direct} of {sum(connections.values())} connections between nodes", wrong, needed=False
    )


SLINGSHOT: tuple[tuple[str, str, dict[str, str]], ...] = (  # topic, why, and the variables of the line to add
    (
        "eager messages",
        "NCCL can hang on eager messages",
        {"FI_CXI_RDZV_GET_MIN": "0", "FI_CXI_RDZV_THRESHOLD": "0", "FI_CXI_RDZV_EAGER_SIZE": "0"},
    ),
    ("completion queue", "large jobs need a larger one", {"FI_CXI_DEFAULT_CQ_SIZE": "131072"}),
    ("MR cache", "the default monitor can hang with NCCL", {"FI_MR_CACHE_MONITOR": "userfaultfd"}),
    ("host memory", "the provider's registration calls can deadlock", {"FI_CXI_DISABLE_HOST_REGISTER": "1"}),
)


def _is_as_good(name: str, value: str, advised: str) -> bool:
    """Whether a variable of libfabric has the advised value, or one that is as good."""
    if name == "FI_CXI_DEFAULT_CQ_SIZE":
        return value.isdigit() and int(value) >= int(advised)
    return value == advised or (name == "FI_MR_CACHE_MONITOR" and value in ("kdreg2", "disabled"))


def slingshot_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of Slingshot's libfabric provider, a line for each topic."""
    for topic, why, variables in SLINGSHOT:
        values = ", ".join(f"{name}={environ.get(name, '(unset)')}" for name in variables)
        missing = [
            f"{name}={advised}"
            for name, advised in variables.items()
            if not _is_as_good(name, environ.get(name, ""), advised)
        ]
        line = f"{why}; `export {' '.join(missing)}`" if missing else None
        yield Finding(topic, values, line, needed=False)


LEAST = 0.8  # of the expected bandwidth


@dataclass(frozen=True)
class Rates:
    """Measured bytes per second: bus bandwidth of an all-reduce of all ranks, and from one rank of `pair` to the other,
    on two nodes if there are two."""

    all_reduce: float
    point_to_point: float
    pair: tuple[int, int]


def rate_findings(expected: Expected, rates: Rates, ranks: int) -> Iterator[Finding]:
    """Measured bandwidth, against what the site file expects."""
    for name, rate, least, what in (
        ("all-reduce", rates.all_reduce, expected.all_reduce, f"bus bandwidth of {ranks} ranks"),
        (
            "rank to rank",
            rates.point_to_point,
            expected.point_to_point,
            f"from rank {rates.pair[0]} to {rates.pair[1]}",
        ),
    ):
        comparison = f", {least / 1e9:.2f} expected" if least else ""
        wrong = None
        if least and rate < LEAST * least:
            wrong = (
                f"{rate / least:.0%} of what the site file expects; see the lines of network, GPUDirect and nodes, and "
                "leave a slow node out: `#SBATCH --exclude=NODE`"
            )
        yield Finding(name, f"{rate / 1e9:.2f} GB/s {what}{comparison}", wrong, needed=False)


FILES_OF_A_RANK, FILES_OF_A_PEER, TASKS_OF_A_RANK = 256, 4, 256  # a rank has sockets to peers; tasks are threads, too
OPTIONS = {"memlock": "l", "nofile": "n", "nproc": "u"}  # of ulimit


def state_findings(hosts: Sequence[str], states: Sequence[NodeState], ranks: Sequence[int]) -> Iterator[Finding]:
    """Limits, /dev/shm and huge pages of the nodes, with the nodes where they are wrong.

    Args:
        ranks: the ranks of each node.
    """
    pairs = list(zip(states, ranks, strict=True))
    limits = ", ".join(f"{name} {_amount(soft)}" for name, (soft, _) in states[0].limits.items())
    low = [limits_problem(state, sum(ranks), local) for state, local in pairs]
    yield Finding("limits", limits, _by_node(hosts, low), needed=False)
    least = min(state.shared_memory or 0 for state in states)
    wrong = _by_node(hosts, [shared_memory_finding(state.shared_memory, local).wrong for state, local in pairs])
    small = [_SMALL if state.has_gpus and (state.shared_memory or 0) < GIB else None for state in states]
    yield Finding("/dev/shm", f"{least / GIB:.2f} GiB free", wrong or _by_node(hosts, small), needed=wrong is not None)
    modes = [state.huge_pages or "unknown" for state in states]
    never = [_NEVER if mode == "never" else None for mode in modes]
    yield Finding("huge pages", f"transparent: {', '.join(sorted(set(modes)))}", _by_node(hosts, never), needed=False)


_SMALL = "NCCL may need 1 GiB: give the container more (`--shm-size=1g`)"  # NVIDIA's advice for containers
_NEVER = (
    "host memory has small pages only, so copies and registration are slower; the site can "
    "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
)


def limits_problem(state: NodeState, size: int, local: int) -> str | None:
    """Limits that are too low for the ranks of a node, with the lines to add."""
    needs = {"nofile": FILES_OF_A_RANK + FILES_OF_A_PEER * size, "nproc": TASKS_OF_A_RANK * local}
    if state.adapters:
        needs["memlock"] = -1  # adapters lock what they register
    low = [
        f"{name} is {_amount(soft)}: {_raise(name, needs[name], hard)}"
        for name, (soft, hard) in state.limits.items()
        if name in needs and soft != -1 and (needs[name] == -1 or soft < needs[name])
    ]
    return ", ".join(low) or None


def _raise(name: str, need: int, hard: int) -> str:
    if hard == -1 or need != -1 and hard >= need:
        return f"`ulimit -{OPTIONS[name]} {_amount(need)}` before srun"
    return f"its hard limit is {_amount(hard)}, {_amount(need)} is needed: `#SBATCH --propagate=NONE`, or ask the site"


def _amount(limit: int) -> str:
    return "unlimited" if limit == -1 else str(limit)


# NVML's bits; power caps and idle clocks are usual
THROTTLES = {0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}


def clock_findings(hosts: Sequence[str], clocks: Sequence[GpuClock | None]) -> Iterator[Finding]:
    """Clocks of the ranks' GPUs right after the all-reduces. Nothing without NVML.

    Args:
        hosts: the host of each rank.
    """
    known = [clock for clock in clocks if clock is not None]
    if known:
        problems = [_throttle_problem(clock) for clock in clocks]
        slow = dict.fromkeys(host for host, problem in zip(hosts, problems, strict=True) if problem)
        wrong = f"{_by_node(hosts, problems)}; `#SBATCH --exclude={','.join(slow)}`" if slow else None
        slowest = min(known, key=lambda clock: clock.now)
        yield Finding("GPU clocks", f"{slowest.now} of {slowest.most} MHz at least", wrong, needed=False)


def _throttle_problem(clock: GpuClock | None) -> str | None:
    reasons = [why for bit, why in THROTTLES.items() if clock is not None and clock.throttles & bit]
    return f"throttled: {', '.join(reasons)}" if reasons else None


def _by_node(hosts: Sequence[str], problems: Sequence[str | None]) -> str | None:
    """Each problem once, with its nodes; None without one."""
    places: dict[str, dict[str, None]] = {}
    for host, problem in zip(hosts, problems, strict=True):
        if problem is not None:
            places.setdefault(problem, {})[host] = None
    return "; ".join(f"{problem} (on {', '.join(where)})" for problem, where in places.items()) or None
