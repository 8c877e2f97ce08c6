"""torch's c10d store on rank 0: its address, and which processes connect to it.

The store has no authentication: a process that connects may list, change and delete all keys. Nothing is in it but what
torch.distributed keeps there.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import resource
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.mpi import all_gather_object, broadcast_object
from hpcrl.runtime.sockets import Address, connections, peer_of

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store

log = logging.getLogger(__name__)

# an address reserved for documentation, which takes the default route; then private networks, for nodes without one
PROBES = ("192.0.2.1", "10.0.0.1", "172.16.0.1", "192.168.0.1")
STORE_OPTIONS: dict[str, Any] = {"timeout": timedelta(minutes=10), "wait_for_workers": False}
MOST_NAMED = 8  # peers in a warning


@dataclass(frozen=True)
class C10dStore:
    """The store. connection: this rank's, below a prefix that other processes cannot guess. listener: the descriptor on
    rank 0; torch closes it."""

    connection: Store
    address: Address
    listener: int | None

    @classmethod
    def open(cls, comm: MPI.Intracomm, host: str | None) -> C10dStore:
        """Start the store on rank 0, on a free port, and connect all ranks. Collective.

        Args:
            host: address of rank 0 for the other ranks. Used on rank 0 only.
        """
        from torch.distributed import PrefixStore, TCPStore

        listener = secret = None
        address: Address | None = None
        if comm.rank == 0:
            assert host is not None
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two connections of every rank end here
            # the port is open before its number is sent, so that no other process can take it in between
            opened = socket.create_server((host, 0), backlog=1024)
            address, secret, listener = opened.getsockname(), secrets.token_hex(16), opened.detach()
            store = TCPStore(*address, comm.size, is_master=True, master_listen_fd=listener, **STORE_OPTIONS)
        address, secret = broadcast_object(comm, (address, secret))
        if comm.rank != 0:
            store = TCPStore(*address, comm.size, is_master=False, **STORE_OPTIONS)
        return cls(PrefixStore(f"hpcrl/{secret}", store), address, listener)

    def close_to_others(self, comm: MPI.Intracomm) -> None:
        """Stop listening, and end connections that no rank has opened. Collective."""
        ends = [own for _, own, peer in connections() if peer == self.address]
        ranks = {end for ends_of_rank in all_gather_object(comm, ends) for end in ends_of_rank}
        if self.listener is None:
            return
        with socket.socket() as unused:
            # torch has no call for this: its thread keeps the descriptor, on which nothing arrives any more
            os.dup2(unused.fileno(), self.listener, inheritable=False)
        if not ranks <= {peer for _, own, peer in connections() if own == self.address}:
            log.warning("some ranks reach torch's store from other addresses than their own; no connection is closed")
            return
        named: list[str] = []
        for connection, own, peer in connections():
            if own == self.address and peer not in ranks:
                named.append(peer_of(connection) if len(named) < MOST_NAMED else "...")
                with suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
        if named:
            who = ", ".join(named[: MOST_NAMED + 1])
            log.warning("closed %d connections to torch's store that are not of this job, from %s", len(named), who)


def listening_host(one_node: bool) -> str:
    """The address on which rank 0 listens: loopback, where all ranks are on one node. Raises InputError."""
    return "127.0.0.1" if one_node else own_address(socket.gethostname())


def own_address(hostname: str) -> str:
    """An IPv4 address at which other nodes reach this node. Raises InputError if there is none."""
    try:
        named = socket.gethostbyname(hostname)
    except OSError:
        named = None
    host = reachable((named, *map(interface_address, PROBES)))
    if host is None:
        raise InputError(
            f"this node's name {hostname!r} resolves to {named or 'nothing'}, which other nodes cannot reach, and no "
            "interface leads to them; give the name the node's address in /etc/hosts or DNS"
        )
    return host


def reachable(addresses: Iterable[str | None]) -> str | None:
    """The first IPv4 address that is neither loopback (127.0.1.1, as Debian resolves a node's own name) nor 0.0.0.0."""
    for address in addresses:
        if address is not None:
            ip = ipaddress.IPv4Address(address)
            if not (ip.is_loopback or ip.is_unspecified):
                return address
    return None


def interface_address(destination: str) -> str | None:
    """Address of the interface that leads to `destination`, or None without a route.

    Connecting a UDP socket sends no packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
