"""Which CPUs a rank is bound to, from planted nodes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.runtime import gpus
from hpcrl.runtime.gpus import Core, is_bound, parse_cpu_list, share
from hpcrl.runtime.launcher import format_spans
from hpcrl.sandbox import fork_server

# Two sockets of four cores with two threads each, numbered as Linux does; four GPUs, two on each socket.
FIRST: list[Core] = [(core, core + 8) for core in range(4)]
SECOND: list[Core] = [(core, core + 8) for core in range(4, 8)]


def test_ranks_divide_the_cores_near_their_gpus() -> None:
    near = [FIRST, FIRST, SECOND, SECOND]
    assert [share(near, rank) for rank in range(4)] == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert share([FIRST, SECOND], 0) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert sorted(cpu for rank in range(3) for cpu in share([FIRST] * 3, rank)) == [*range(4), *range(8, 12)]


def test_nothing_is_shared_out_where_cores_are_unknown_or_too_few() -> None:
    assert share([[], []], 0) == []
    assert share([FIRST[:1]] * 2, 0) == []


def test_a_process_without_all_cpus_is_bound() -> None:
    assert not is_bound({0, 1, 2, 3}, [0, 1, 2, 3])
    assert is_bound({0, 1}, [0, 1, 2, 3])
    assert is_bound({0, 1}, [])


@pytest.mark.parametrize("text, cpus", [("0-2,8", [0, 1, 2, 8]), ("5", [5]), ("", []), ("0,2-3", [0, 2, 3])])
def test_lists_of_cpus(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(f"{text}\n") == cpus
    assert format_spans(cpus) == text


def plant(sysfs: Path, pci_id: str, cpus: str, cores: list[Core]) -> None:
    device = sysfs / "bus/pci/devices" / pci_id
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{cpus}\n")
    for core in cores:
        for cpu in core:
            topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")


def test_cores_near_a_gpu_are_read_from_sysfs(tmp_path: Path) -> None:
    plant(tmp_path, "0000:1b:00.0", "4-7,12-15", SECOND)
    assert gpus.cores_near("0000:1b:00.0", str(tmp_path)) == SECOND
    assert gpus.cores_near("0000:99:00.0", str(tmp_path)) == []
    assert gpus.cores_near("", str(tmp_path)) == []
    plant(tmp_path, "0000:2c:00.0", "0-1", [])  # a container may hide the topology
    assert gpus.cores_near("0000:2c:00.0", str(tmp_path)) == [(0,), (1,)]


class TestBindNearGpu:
    """Of a rank that is alone on its node; all that is bound is recorded."""

    @pytest.fixture
    def bound(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        monkeypatch.setattr(gpus, "all_gather_object", lambda node, mine: [mine])
        monkeypatch.setattr(gpus, "bind", calls.append)
        monkeypatch.setattr(gpus, "cores_near", {"gpu": FIRST}.get)
        monkeypatch.setattr(gpus, "online_cpus", lambda: list(range(16)))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
        return calls

    def test_a_rank_is_bound_near_its_gpu(self, bound: list[Any]) -> None:
        assert gpus.bind_near_gpu(SimpleNamespace(rank=0), "gpu") == [0, 1, 2, 3, 8, 9, 10, 11]
        assert bound == [[0, 1, 2, 3, 8, 9, 10, 11]]

    def test_what_a_launcher_has_bound_stays(self, bound: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        assert gpus.bind_near_gpu(SimpleNamespace(rank=0), "gpu") is None
        assert bound == []


def where(queue: Any) -> None:
    queue.put(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_and_children_are_bound_as_well() -> None:
    before = os.sched_getaffinity(0)
    fork_server.start()
    waits, seen = threading.Event(), []
    thread = threading.Thread(target=lambda: (waits.wait(), seen.append(os.sched_getaffinity(0))))
    thread.start()
    try:
        cpu = max(before)
        gpus.bind([cpu])
        waits.set()
        thread.join()
        queue = fork_server.context().SimpleQueue()
        child = fork_server.context().Process(target=where, args=(queue,))
        child.start()
        seen.append(queue.get())
        child.join()
        assert [*seen, os.sched_getaffinity(0)] == [{cpu}] * 3
    finally:
        gpus.bind(sorted(before))
