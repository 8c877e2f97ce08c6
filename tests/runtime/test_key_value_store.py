"""Ranks' strings on rank 0, beside another user of the node who connects, guesses, floods, and sends nothing."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from hpcrl.runtime import key_value_store
from hpcrl.runtime.key_value_store import (
    LENGTH,
    MOST_BYTES,
    SECRET_BYTES,
    Connection,
    KeyValueStore,
    RankListener,
    Values,
    connect,
    pack,
    serve,
)
from hpcrl.runtime.sockets import Address
from tests.other_user import NAME, second_user


class RankZero:
    def __init__(self, ranks: int) -> None:
        self.listener = RankListener("127.0.0.1", ranks - 1)
        self.address, self.secret = self.listener.address, self.listener.secret
        execute = Values().execute
        self.store = KeyValueStore(execute)
        self._thread = threading.Thread(target=serve, args=(self.listener, execute), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def has_ended(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()


def connect_all(zero: RankZero, ranks: int) -> list[socket.socket]:
    zero.start()
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda _: connect(zero.address, zero.secret), range(1, ranks)))


def until_closed(connection: socket.socket) -> None:
    """Wait until the other end closes; it sends nothing."""
    connection.settimeout(30)
    with suppress(ConnectionError):
        assert connection.recv(1) == b""


def send_and_wait(address: Address, *parts: bytes) -> None:
    """Send in parts, and wait for the end of the connection."""
    connection = socket.create_connection(address)
    with suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
            time.sleep(0.01)
    until_closed(connection)


def flood(address: Address) -> None:
    connections = [socket.create_connection(address) for _ in range(500)]
    for connection in connections:
        until_closed(connection)


REQUEST = pack(["set", "stop", "SIGTERM on rank 3 (n1)"])
ATTACKS: dict[str, Callable[[Address], None]] = {
    "nothing": lambda address: send_and_wait(address),
    "a wrong secret": lambda address: send_and_wait(address, secrets.token_bytes(SECRET_BYTES) + REQUEST),
    "a request": lambda address: send_and_wait(address, REQUEST),
    "garbage": lambda address: send_and_wait(address, os.urandom(1 << 20)),
    "a length": lambda address: send_and_wait(address, LENGTH.pack(2**32 - 1), bytes(1 << 16)),
    "bytes one by one": lambda address: send_and_wait(address, *[b"\0"] * (SECRET_BYTES - 1)),
    "half a secret": lambda address: socket.create_connection(address).sendall(bytes(SECRET_BYTES // 2)),
    "a flood": flood,
}


@pytest.mark.parametrize("attacks", [[name] for name in ATTACKS] + [list(ATTACKS)], ids=[*ATTACKS, "all"])
def test_connections_without_the_secret_change_nothing(attacks: list[str], caplog: pytest.LogCaptureFixture) -> None:
    zero = RankZero(4)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        attackers = [stack.enter_context(second_user(ATTACKS[name], zero.address)) for name in attacks]
        time.sleep(0.2)  # the attackers are first
        ranks = connect_all(zero, 4)
        for wait in attackers:
            wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(zero.address)
    stores = [KeyValueStore(Connection(rank).execute) for rank in ranks]
    assert [store.get("stop") for store in (zero.store, *stores)] == [None] * 4
    stores[0].set("stop", "SIGUSR1 on rank 1")
    assert [store.get("stop") for store in (zero.store, *stores)] == ["SIGUSR1 on rank 1"] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= key_value_store.MOST_WARNINGS + 1
    if attacks != ["half a secret"]:  # it has left
        assert "from 127.0.0.1:" in lines[0] and f"(user {NAME})" in "".join(lines)


def test_a_connection_that_sends_nothing_is_closed_while_ranks_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "SECRET_SECONDS", 0.2)
    zero = RankZero(2)
    zero.start()
    for _ in range(3):
        with second_user(ATTACKS["nothing"], zero.address) as wait:
            wait()
    rank = KeyValueStore(Connection(connect(zero.address, zero.secret)).execute)
    zero.store.set("key", "text")
    assert rank.get("key") == "text"


@pytest.fixture
def zero() -> RankZero:
    return RankZero(4)


@pytest.fixture
def ranks(zero: RankZero) -> Iterator[list[socket.socket]]:
    connections = connect_all(zero, 4)
    yield connections
    for connection in connections:
        connection.close()
    assert zero.has_ended()


def test_any_thread_of_any_rank_reads_and_writes(zero: RankZero, ranks: list[socket.socket]) -> None:
    stores = [zero.store, *(KeyValueStore(Connection(rank).execute) for rank in ranks)]
    texts = ["", "\ud83d \u202e\n", "x" * 300_000]

    def use(number: int) -> None:
        store, mine = stores[number % 4], f"save/{number}"
        for text in texts * 3:
            store.set(mine, text)
            assert store.get(mine) == text
        assert stores[(number + 1) % 4].get(mine) == texts[-1]
        store.delete(mine)
        store.delete(mine)
        assert store.get(mine) is None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(16)))
    with pytest.raises(ValueError, match=f"at most {MOST_BYTES}"):
        stores[1].set("long", "x" * MOST_BYTES)
    assert stores[1].get("long") is None


def test_a_rank_that_stops_in_the_middle_does_not_stop_the_others(zero: RankZero, ranks: list[socket.socket]) -> None:
    zero.store.set("large", "y" * 20_000_000)
    ranks[0].sendall(pack(["get", "large"]))  # and does not read the answer
    ranks[1].sendall(pack(["set", "half", "z" * 100])[:50])
    other = KeyValueStore(Connection(ranks[2]).execute)
    other.set("key", "text")
    assert other.get("key") == "text" and other.get("half") is None
    ranks[1].sendall(pack(["set", "half", "z" * 100])[50:])
    while other.get("half") is None:
        time.sleep(0.01)
    answer = bytearray()
    while len(answer) < 20_000_000 + 2 + LENGTH.size:
        answer += ranks[0].recv(1 << 20)
    assert answer == pack("y" * 20_000_000)


@pytest.mark.parametrize(
    "message", [LENGTH.pack(MOST_BYTES + 1), LENGTH.pack(5) + b'["ge"', LENGTH.pack(4) + b"\xff" * 4]
)
def test_a_damaged_message_ends_its_connection_only(zero: RankZero, ranks: list[socket.socket], message: bytes) -> None:
    ranks[0].sendall(message)
    until_closed(ranks[0])
    other = KeyValueStore(Connection(ranks[1]).execute)
    other.set("key", "text")
    assert zero.store.get("key") == "text"


def test_an_end_of_rank_0_is_a_runtime_error() -> None:
    zero = RankZero(2)
    child = os.fork()
    if child == 0:
        serve(zero.listener, Values().execute)
        os._exit(0)
    store = KeyValueStore(Connection(connect(zero.address, zero.secret)).execute)
    store.set("key", "text")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for use in (lambda: store.get("key"), lambda: store.set("key", "text")):
        with pytest.raises(RuntimeError, match="rank 0 does not answer"):
            use()
    zero.listener._listener.close()
    with pytest.raises(RuntimeError, match="cannot connect to the rank at"):
        connect(zero.address, zero.secret)
