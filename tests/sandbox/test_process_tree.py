"""Who is below a process, with and without a kernel that lists children."""

from __future__ import annotations

import os
import subprocess
import time

import psutil
import pytest

from hpcrl.sandbox import process_tree
from tests.processes import alive, with_argument


@pytest.mark.parametrize("listed", [process_tree.HAS_CHILDREN_FILE, False])
def test_all_below_a_process_are_found_and_go_with_it(monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    monkeypatch.setattr(process_tree, "HAS_CHILDREN_FILE", listed)
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
        assert process_tree.children_of(os.getpid()).count(shell.pid) == 1
        assert sorted(process_tree.descendants_of(shell.pid)) == sorted(process.pid for process in below)
    finally:
        process_tree.kill_tree(shell.pid)
    assert shell.wait(10) == -9
    _, left = psutil.wait_procs(below, timeout=10)
    assert not alive(left)
    assert process_tree.children_of(shell.pid) == []


def test_orphans_of_a_group_are_killed_with_the_process_that_leads_it() -> None:
    nap = f"1002.{os.getpid()}"
    script = f"(sleep {nap} & sleep {nap} &); sleep {nap} & wait"
    shell = psutil.Popen(["sh", "-c", script], start_new_session=True)
    try:
        give_up = time.monotonic() + 20
        while len(naps := with_argument(nap)) < 3:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process_tree.kill_tree(naps[0].pid)
        psutil.wait_procs(naps[:1], timeout=10)
        assert [process.status() for process in (shell, *naps[1:])] == ["sleeping"] * 3
    finally:
        process_tree.kill_tree(shell.pid)
    shell.wait(10)
    _, left = psutil.wait_procs(naps, timeout=10)
    assert not alive(left)
