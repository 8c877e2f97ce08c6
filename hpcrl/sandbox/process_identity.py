"""Which process of this host one was: its id and when it began, in this boot and namespace.

Imported in children: standard library only.
"""

from __future__ import annotations

import os


def process_runs(pid: int, started: int) -> bool | None:
    """Whether a process of this host exists that began at this time; None if it is hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    found = started_at(pid)
    return None if found is None else found == started


def started_at(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; -1 if it has ended and is a zombie, None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before may hold anything
    return -1 if state in "ZX" else int(rest[18])


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
