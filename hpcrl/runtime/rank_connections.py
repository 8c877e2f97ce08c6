"""TCP connections of all ranks to rank 0, which no other process can open.

Rank 0 draws a secret, MPI delivers it, and a connection begins with it. Once all ranks are connected, nothing listens.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from hpcrl.runtime.sockets import Address, peer_of

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
    """Listens on rank 0 until all other ranks are connected."""

    def __init__(self, host: str, count: int) -> None:
        """count: number of other ranks."""
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
            log.warning("closed %d connections to rank 0 that did not send this job's secret", self._num_rejected)
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
                "closed a connection to rank 0 that did not send this job's secret, from %s",
                peer_of(newcomer.connection),
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
    """Connect this rank to rank 0. Retries, because rank 0 closes the oldest connections where processes without the
    secret open many.

    Raises RuntimeError if rank 0 has ended, or does not answer.
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
                raise RuntimeError("cannot connect to rank 0 at {}:{}: {}".format(*address, error)) from error
        time.sleep(RETRY_SECONDS)
