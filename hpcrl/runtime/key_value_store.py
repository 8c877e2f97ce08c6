"""Strings by key on rank 0, which any thread of any rank may read and write.

MPI is called from the main thread only, so other threads communicate through this store. Ranks act on what it holds.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.mpi import barrier, broadcast_object
from hpcrl.runtime.rank_connections import RankListener, connect

if TYPE_CHECKING:
    from mpi4py import MPI

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
