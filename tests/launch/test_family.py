"""Who is below a process, with and without a kernel that lists children."""

from __future__ import annotations

import os
import subprocess
import time

import psutil
import pytest

from hpcrl.launch import family
from tests.processes import alive


@pytest.mark.parametrize("listed", [family.LISTED, False])
def test_all_below_a_process_are_found_and_go_with_it(monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    monkeypatch.setattr(family, "LISTED", listed)
    nap = f"1001.{os.getpid()}"
    shell = subprocess.Popen(["sh", "-c", f"(sleep {nap}; :) & (setsid sleep {nap}; :) & wait"])
    try:
        give_up = time.monotonic() + 20
        while [process.cmdline() for process in psutil.Process(shell.pid).children(recursive=True)].count(
            ["sleep", nap]
        ) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        below = psutil.Process(shell.pid).children(recursive=True)
        assert family.children_of(os.getpid()).count(shell.pid) == 1
        assert sorted(family.descendants_of(shell.pid)) == sorted(process.pid for process in below)
    finally:
        family.kill_tree(shell.pid)
    assert shell.wait(10) == -9
    _, left = psutil.wait_procs(below, timeout=10)
    assert not alive(left)
    assert family.children_of(shell.pid) == []
