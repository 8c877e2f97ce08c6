"""What the log of NCCL or RCCL says about the network that it uses.

They write such lines with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH. The formats were read from the sources
of NCCL 2.21.5, 2.22.3, 2.27.7 and 2.30.7, of RCCL 2.21.5 and of aws-ofi-nccl 1.9.2, 1.14.2 and 1.21, and from logs in
public issues; they were not run on several GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    """Parse the log of a rank whose only communicator is the world's. node_of: the node of each rank."""
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
