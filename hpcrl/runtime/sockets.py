"""Sockets of this node in the kernel's tables (/proc): where processes listen, and whose process a peer is.

For `hpcrl check --job`, sockets of the processes of a job are named by what has opened them.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.runtime.launcher import node_name

Address = tuple[str, int]  # host and port
LISTENS = "0A"
TABLES = ("tcp", "tcp6", "udp", "udp6")


class Entry(NamedTuple):
    """A line of a table. inode: "0" if no process has the socket any more; then `user` says nothing."""

    table: str
    local: str
    remote: str
    state: str
    user: int
    inode: str


def listening(pid: int | str) -> dict[str, Address]:
    """Inode -> address of the process's TCP sockets that listen, and of all its UDP sockets. Raises OSError."""
    return addresses_of_listening(socket_inodes(pid), pid)


def addresses_of_listening(inodes: set[str], pid: int | str = "self") -> dict[str, Address]:
    """As `listening`, of the sockets `inodes` in the process's network namespace."""
    return {
        entry.inode: _decode(entry.local)
        for entry in entries(pid)
        if entry.inode in inodes and (entry.state == LISTENS or entry.table.startswith("udp"))
    }


def socket_inodes(pid: int | str) -> set[str]:
    """The process's sockets. Raises OSError."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now
            kind, _, inode = str(descriptor.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def connections() -> Iterator[tuple[socket.socket, Address, Address]]:
    """This process's TCP connections: a duplicate of the socket, closed afterwards, its address and its peer's."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed by now, or listens
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        yield connection, plain(connection.getsockname()), plain(connection.getpeername())


def peer_of(connection: socket.socket) -> str:
    """The other end of a TCP connection, such as "10.0.0.3:4711", with its user if it is a process of this node."""
    try:
        peer, own = plain(connection.getpeername()), plain(connection.getsockname())
    except OSError:
        return "a process that has left"
    name = "{}:{}".format(*peer)
    with suppress(OSError):
        for entry in entries("self"):
            # an IPv4 address in the table of IPv6 has the words of IPv4 at its end
            if entry.local.endswith(_encode(peer)) and entry.remote.endswith(_encode(own)) and entry.inode != "0":
                return f"{name} (user {user_name(entry.user)})"
    return name


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def entries(pid: int | str) -> Iterator[Entry]:
    """All TCP and UDP sockets of the process's network namespace."""
    for table in TABLES:
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                field = line.split()
                yield Entry(table, field[1], field[2], field[3], int(field[7]), field[9])


def plain(address: tuple[Any, ...]) -> Address:
    """Host and port; the host as an IPv4 address where IPv6 has it in ::ffff:10.0.0.3."""
    return address[0].removeprefix("::ffff:"), address[1]


def _decode(text: str) -> Address:
    """The kernel prints an address as 32-bit words in the machine's byte order, and the port as a number."""
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)


def _encode(address: Address) -> str:
    """The reverse of `_decode`, for IPv4."""
    return f"{struct.unpack('=I', socket.inet_aton(address[0]))[0]:08X}:{address[1]:04X}"


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
