"""The c10d store on rank 0: its address, and strings that any thread may read and write.

MPI is called from the main thread only, so other threads communicate through the store.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.mpi import broadcast_object

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import Store


# an address reserved for documentation, which takes the default route; then private networks, for nodes without one
PROBES = ("192.0.2.1", "10.0.0.1", "172.16.0.1", "192.168.0.1")
STORE_OPTIONS: dict[str, Any] = {"timeout": timedelta(minutes=10), "wait_for_workers": False}


class KeyValueStore:
    """Strings by key in rank 0's store, over a connection of its own. Safe from any thread: a lock serializes calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def set(self, key: str, text: str) -> None:
        with self._lock:
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """The value, or None if the key has not been set. Does not wait."""
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        with self._lock:
            self._store.delete_key(key)


def open_store(comm: MPI.Intracomm, one_node: bool) -> tuple[Store, tuple[str, int]]:
    """Start the c10d store on rank 0, on a free port, and return this rank's connection and the address. Collective.

    With one node the store listens on loopback only.
    """
    from torch.distributed import TCPStore

    address = None
    if comm.rank == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two connections of every rank end here
        host = "127.0.0.1" if one_node else own_address(socket.gethostname())
        listener = socket.create_server((host, 0), backlog=1024)
        address = listener.getsockname()
        # the port is open before its number is sent, so that no other process can take it in between
        listen = listener.detach()
        store = TCPStore(*address, comm.size, is_master=True, master_listen_fd=listen, **STORE_OPTIONS)
    address = broadcast_object(comm, address)
    return (store if comm.rank == 0 else connect_store(address, comm.size)), address


def connect_store(address: tuple[str, int], size: int) -> Store:
    """Open another connection to the store: one connection serves one thread at a time."""
    from torch.distributed import TCPStore

    return TCPStore(*address, size, is_master=False, **STORE_OPTIONS)


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
