"""Strings by key on rank 0, which any thread of any rank may read and write.

MPI is called from the main thread only, so other threads communicate through this store. Ranks act on what it holds.
Its TCP connections lead from all ranks to rank 0, and no other process can open one: rank 0 draws a secret, MPI
delivers it, and a connection begins with it. Once all ranks are connected, nothing listens.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.mpi import barrier, broadcast_object
from hpcrl.runtime.sockets import Address, peer_of

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)

SECRET_BYTES = 32
SECRET_SECONDS = 5.0  # in which a connection has to send the secret
MOST_NEWCOMERS = 64  # connections without the secret, besides one for each rank: the oldest one is closed
MOST_WARNINGS = 8  # about connections without the secret
WELCOME = b"\1"
TIMEOUT = 600.0  # seconds that a rank waits for rank 0
RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Newcomer:
    """A connection that has not sent the whole secret. give_up: monotonic time."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    give_up: float = field(default_factory=lambda: time.monotonic() + SECRET_SECONDS)


class RankListener:
    """Listens on a rank until so many others are connected."""

    def __init__(self, host: str, count: int, rank: int = 0) -> None:
        """Listen on a free port.

        Args:
            count: number of the other ranks.
            rank: the rank that listens.
        """
        self._rank = rank
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._count = count
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._newcomers: dict[int, Newcomer] = {}  # by file descriptor, the oldest one first
        self._num_rejected = 0

    def accept(self) -> list[socket.socket]:
        """Accept all ranks, stop listening, and return their connections, in no order.

        A rank continues at once, because it may have to forward in MPI what others need to connect; but the last one
        continues when nothing listens any more.
        """
        ranks: list[socket.socket] = []
        with self._selector, self._listener:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while len(ranks) < self._count:
                for key, _ in self._selector.select(SECRET_SECONDS / 10):
                    if key.fileobj is self._listener:
                        self._accept_one()
                    elif key.fd in self._newcomers and self._has_secret(self._newcomers[key.fd]):
                        ranks.append(self._remove(key.fd))
                        if len(ranks) < self._count:
                            _welcome(ranks[-1])
                while (oldest := next(iter(self._newcomers.values()), None)) and oldest.give_up < time.monotonic():
                    self._reject(oldest)
            for newcomer in list(self._newcomers.values()):
                self._reject(newcomer)
        if self._num_rejected > MOST_WARNINGS:
            log.warning(
                "closed %d connections to rank %d that did not send this job's secret", self._num_rejected, self._rank
            )
        _welcome(ranks[-1])
        return ranks

    def _accept_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has left, or too many files are open
            time.sleep(RETRY_SECONDS)
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._newcomers[connection.fileno()] = Newcomer(connection)
        if len(self._newcomers) > MOST_NEWCOMERS + self._count:
            self._reject(next(iter(self._newcomers.values())))

    def _has_secret(self, newcomer: Newcomer) -> bool:
        try:
            part = newcomer.connection.recv(SECRET_BYTES - len(newcomer.received))
        except BlockingIOError:  # the event was of an earlier connection with this descriptor
            return False
        except OSError:
            part = b""
        newcomer.received.extend(part)
        if part and len(newcomer.received) < SECRET_BYTES:
            return False
        is_rank = hmac.compare_digest(newcomer.received, self.secret)
        if not is_rank:
            self._reject(newcomer)
        return is_rank

    def _reject(self, newcomer: Newcomer) -> None:
        self._num_rejected += 1
        if self._num_rejected <= MOST_WARNINGS:
            log.warning(
                "closed a connection to rank %d that did not send this job's secret, from %s",
                *(self._rank, peer_of(newcomer.connection)),
            )
        self._remove(newcomer.connection.fileno()).close()

    def _remove(self, descriptor: int) -> socket.socket:
        connection = self._newcomers.pop(descriptor).connection
        self._selector.unregister(connection)
        return connection


def _welcome(rank: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        rank.sendall(WELCOME)


def connect(address: Address, secret: bytes) -> socket.socket:
    """Connect this rank to one that listens. Retries, because that one closes the oldest connections where processes
    without the secret open many.

    Raises RuntimeError if the other rank has ended, or does not answer.
    """
    give_up = time.monotonic() + TIMEOUT
    while True:
        try:
            connection = socket.create_connection(address, timeout=TIMEOUT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            if connection.recv(len(WELCOME)) == WELCOME:
                return connection
            connection.close()
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > give_up:
                raise RuntimeError("cannot connect to the rank at {}:{}: {}".format(*address, error)) from error
        time.sleep(RETRY_SECONDS)


LENGTH = struct.Struct("!I")  # before each message, which is JSON
MOST_BYTES = 64 << 20  # of a message

Execute = Callable[[list[str]], str | None]  # of ["set", key, text], ["get", key] or ["delete", key]


class KeyValueStore:
    """Strings by key on rank 0. Safe from any thread. A method raises RuntimeError if rank 0 has ended."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    def set(self, key: str, text: str) -> None:
        self._execute(["set", key, text])

    def get(self, key: str) -> str | None:
        """The value, or None if the key has not been set. Does not wait until it is."""
        return self._execute(["get", key])

    def delete(self, key: str) -> None:
        self._execute(["delete", key])


def open_key_value_store(comm: MPI.Intracomm, host: str | None) -> KeyValueStore:
    """Connect all ranks to a store on rank 0. Collective. Nothing listens any more when it returns.

    Args:
        host: address of rank 0 for the other ranks. Used on rank 0 only.
    """
    if comm.rank != 0:
        address, secret = broadcast_object(comm, None)
        execute = Connection(connect(address, secret)).execute
    else:
        execute = Values().execute
        if comm.size > 1:
            assert host is not None
            listener = RankListener(host, comm.size - 1)
            threading.Thread(target=serve, args=(listener, execute), name="key-value store", daemon=True).start()
            broadcast_object(comm, (listener.address, listener.secret))
    barrier(comm)  # meanwhile rank 0 delivers the broadcast, which may take calls of MPI
    return KeyValueStore(execute)


class Values:
    """The strings, on rank 0."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def execute(self, request: list[str]) -> str | None:
        verb, key, *text = request
        with self._lock:
            if verb == "set":
                (self._values[key],) = text
            elif verb == "delete":
                self._values.pop(key, None)
            else:
                return self._values.get(key)
        return None


class Connection:
    """Another rank's connection to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def execute(self, request: list[str]) -> str | None:
        message = pack(request)
        with self._lock:
            try:
                self._socket.sendall(message)
                (length,) = LENGTH.unpack(self._receive(LENGTH.size))
                answer: str | None = json.loads(self._receive(length))
            except OSError as error:
                self._socket.close()  # the answer may still come, and would be taken for that of the next request
                raise RuntimeError(f"rank 0 does not answer: {error}") from error
        return answer

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            part = self._socket.recv(count - len(received))
            if not part:
                raise ConnectionError("it has ended")
            received += part
        return bytes(received)


def serve(listener: RankListener, execute: Execute) -> None:
    """Accept all ranks, and answer their requests until all of them have ended."""
    with selectors.DefaultSelector() as selector:
        for connection in listener.accept():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection, selectors.EVENT_READ, Peer(connection, execute))
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    selector.modify(key.fileobj, key.data.advance(), key.data)
                except (OSError, ValueError):  # the rank has ended
                    selector.unregister(key.fileobj)
                    key.data.connection.close()


class Peer:
    """Another rank's connection, on rank 0. A rank sends its next request once it has the answer to the one before."""

    def __init__(self, connection: socket.socket, execute: Execute) -> None:
        self.connection = connection
        self._execute = execute
        self._received = bytearray()
        self._to_send = b""

    def advance(self) -> int:
        """Receive or send what is possible without waiting. Returns the event to wait for; raises ConnectionError."""
        if not self._to_send:
            self._receive()
        if self._to_send:
            with suppress(BlockingIOError):
                self._to_send = self._to_send[self.connection.send(self._to_send) :]
        return selectors.EVENT_WRITE if self._to_send else selectors.EVENT_READ

    def _receive(self) -> None:
        part = self.connection.recv(1 << 20)
        if not part:
            raise ConnectionResetError
        self._received += part
        if len(self._received) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(self._received)
        if length > MOST_BYTES:
            raise ConnectionAbortedError
        if len(self._received) == LENGTH.size + length:
            self._to_send = pack(self._execute(json.loads(self._received[LENGTH.size :])))
            self._received.clear()


def pack(value: Any) -> bytes:
    """A message. Raises ValueError if it is too long."""
    text = json.dumps(value).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(f"a message of {len(text)} bytes for the key-value store; at most {MOST_BYTES}")
    return LENGTH.pack(len(text)) + text
