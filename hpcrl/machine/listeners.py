"""Where the processes of a job listen, by what has opened the sockets, for `hpcrl check --job`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.sockets import Address, listening

LAUNCHERS = ("mpiexec", "mpirun", "hydra_pmi_proxy", "prterun", "prted", "orted", "srun", "slurmstepd")
MOST_PORTS = 8  # in one line


@dataclass(frozen=True)
class Listener:
    """A socket that listens on a node. owner: what has opened it, such as "MPI". inode: the same for each process that
    has the socket."""

    node: str
    owner: str
    address: Address
    inode: str


class OpenedSockets:
    """The sockets of this process that listen: each belongs to the first owner with which `note` finds it."""

    def __init__(self) -> None:
        self._found: dict[str, Listener] = {}
        for pid, name in reversed(list(launchers())):  # the inner ones inherit sockets
            with suppress(OSError):  # of root, as Slurm's
                self._note(name, listening(pid))
        self.note("the launcher")

    def note(self, owner: str, address: Address | None = None) -> None:
        """Note what `owner` has opened: all sockets that are new, or those of an address."""
        new = listening("self")
        self._note(owner, {inode: at for inode, at in new.items() if address in (None, at)})

    def all(self) -> list[Listener]:
        return list(self._found.values())

    def _note(self, owner: str, sockets: dict[str, Address]) -> None:
        for inode, address in sockets.items():
            self._found.setdefault(inode, Listener(node_name(), owner, address, inode))


def launchers() -> Iterator[tuple[int, str]]:
    """Process ids and names of this rank's launchers on this node, its parent first."""
    pid = os.getppid()
    while pid > 1:
        try:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except OSError:
            return
        if status["Name"] in LAUNCHERS:
            yield pid, status["Name"]
        pid = int(status["PPid"])


@dataclass(frozen=True)
class Group:
    """Listeners of one owner on one address of a node."""

    node: str
    owner: str
    host: str
    ports: list[int]

    def __str__(self) -> str:
        more = f" and {len(self.ports) - MOST_PORTS} more" if len(self.ports) > MOST_PORTS else ""
        return f"{self.owner} on {self.node}, {self.host}, port {', '.join(map(str, self.ports[:MOST_PORTS]))}{more}"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def grouped(listeners: Iterable[Listener]) -> list[Group]:
    """The listeners, in their order. Processes that share a socket count once."""
    sockets = {(each.node, each.inode): each for each in listeners}
    ports: dict[tuple[str, str, str], list[int]] = {}
    for each in sockets.values():
        ports.setdefault((each.node, each.owner, each.address[0]), []).append(each.address[1])
    return [Group(*place, sorted(found)) for place, found in ports.items()]
