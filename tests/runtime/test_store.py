"""torch's store beside another user of the node: earlier connections are closed, and there are no later ones."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpcrl.runtime import store
from hpcrl.runtime.sockets import Address, listening
from hpcrl.runtime.store import STORE_OPTIONS, C10dStore
from tests.other_user import NAME, second_user

ONE_RANK: Any = SimpleNamespace(rank=0, size=1)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> C10dStore:
    monkeypatch.setattr(store, "all_gather_object", lambda comm, value: [value])
    monkeypatch.setattr(store, "broadcast_object", lambda comm, value: value)
    return C10dStore.open(ONE_RANK, "127.0.0.1")


def hold(address: Address, count: int) -> None:
    """Connect so often, ask for a key that is not there in each, and wait for the ends of the connections."""
    connections = [socket.create_connection(address) for _ in range(count)]
    for connection in connections:
        connection.settimeout(30)
        assert connection.recv(1) == b""


def test_other_users_are_shut_out_and_ranks_stay(opened: C10dStore, caplog: pytest.LogCaptureFixture) -> None:
    rank_1 = dist.TCPStore(*opened.address, 2, is_master=False, **STORE_OPTIONS)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        waits = [stack.enter_context(second_user(hold, opened.address, count)) for count in (1, 30)]
        time.sleep(0.2)  # the attackers are first
        opened.close_to_others(ONE_RANK)
        for wait in waits:
            wait()
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line.startswith("closed 31 connections to torch's store") and line.count(f"(user {NAME})") == store.MOST_NAMED
    )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(opened.address)
    assert opened.address not in listening("self").values()
    rank_1.set("key", "text")
    assert rank_1.get("key") == b"text"
    opened.connection.set("key", "of this job")
    assert opened.connection.get("key") == b"of this job" and rank_1.get("key") == b"text"
    begin = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begin < 0.1, "torch's thread does not wait"
    (name,) = [key for key in rank_1.list_keys() if key.startswith("hpcrl/")]
    assert len(name) == len("hpcrl/") + 32 + len("/key")


def test_without_others_nothing_is_logged(opened: C10dStore, caplog: pytest.LogCaptureFixture) -> None:
    opened.close_to_others(ONE_RANK)
    assert caplog.records == []


def test_ranks_behind_other_addresses_stay(
    opened: C10dStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network between the nodes may translate addresses."""
    monkeypatch.setattr(store, "all_gather_object", lambda comm, value: [value, [("10.1.2.3", 4711)]])
    rank_1 = dist.TCPStore(*opened.address, 2, is_master=False, **STORE_OPTIONS)
    opened.close_to_others(ONE_RANK)
    rank_1.set("key", "text")
    assert rank_1.get("key") == b"text"
    assert [record.getMessage()[:40] for record in caplog.records] == ["some ranks reach torch's store from other"[:40]]
