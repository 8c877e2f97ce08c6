"""The address that rank 0 gives the other nodes for the store."""

from __future__ import annotations

import socket

import pytest

from hpcrl.runtime import store
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.store import interface_address, own_address, reachable


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["10.1.2.3", "192.168.0.7"], "10.1.2.3"),  # the name says it
        (["127.0.1.1", "192.168.0.7"], "192.168.0.7"),  # Debian's /etc/hosts
        ([None, None, "172.16.3.4"], "172.16.3.4"),  # a name that nobody knows, no default route
        (["0.0.0.0", "10.1.2.3"], "10.1.2.3"),
        (["127.0.0.1", None], None),
        ([], None),
    ],
)
def test_the_first_address_that_others_reach(addresses: list[str | None], chosen: str | None) -> None:
    assert reachable(addresses) == chosen


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("named", ["127.0.1.1", None])
def test_a_name_of_loopback_gives_way_to_the_interface(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(_hostname: str) -> str:
        if named is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return named

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(store, "interface_address", lambda destination: "10.9.8.7")
    assert own_address("node7") == "10.9.8.7"
    monkeypatch.setattr(store, "interface_address", lambda destination: None)
    with pytest.raises(InputError, match=f"'node7' resolves to {named or 'nothing'}"):
        own_address("node7")
