"""What a process lets others connect to, by the kernel's own tables (/proc)."""

from __future__ import annotations

import socket
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> dict[str, str]:
    """inode -> address of its TCP sockets that listen and of all its UDP sockets."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kind, _, inode = str(descriptor.readlink()).partition(":")
        except OSError:  # closed by now
            continue
        if kind == "socket":
            mine.add(inode.strip("[]"))
    found = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if inode in mine and (state == LISTEN or table.startswith("udp")):
                found[inode] = address_of(local.partition(":")[0])
    return found


def address_of(words: str) -> str:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
