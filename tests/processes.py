"""Which processes are there."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run. Zombies are gone: some containers have no init that reaps them."""
    return [process for process in processes if _is_alive(process)]


def with_argument(argument: str) -> list[psutil.Process]:
    """Those of the whole machine that run with it."""
    return alive(process for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or []))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False
