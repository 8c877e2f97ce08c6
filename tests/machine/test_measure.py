"""`hpcrl check --job --machine`: the file that it writes, and what it does not start with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.machine.machine_file import Machine, read_machine
from tests.runtime.conftest import MPIEXEC, Ended

CHECKING_JOB = Path(__file__).with_name("checking_job.py")
DIRECT = """
import statistics, time, torch
from hpcrl.kernels.onednn import use_onednn

def seconds(call):
    call()
    found = []
    for _ in range(9):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return statistics.median(found)

torch.set_num_threads(1)
use_onednn()
left, right = torch.randn(512, 1024), torch.randn(1024, 1024)
source = torch.zeros(2**26, dtype=torch.uint8)
target = torch.zeros_like(source)
print(2 * 512 * 1024 * 1024 / seconds(lambda: torch.mm(left, right)), 2 * 2**26 / seconds(lambda: target.copy_(source)))
"""


def measure(run: Callable[..., Ended], ranks: int, *job: str | Path) -> Ended:
    job = job or ("-m", "hpcrl", "check", "--job")
    return run(MPIEXEC, "-n", str(ranks), sys.executable, *job, "--machine", "out.yaml")


def figures(ended: Ended, folder: Path) -> Machine:
    """What was measured; the file and the output agree, and nothing else is left."""
    assert ended.code == 0 and ended.stdout.endswith("written to out.yaml\n"), ended.stdout + ended.stderr
    assert [path.name for path in folder.iterdir()] == ["out.yaml"]
    machine = read_machine(str(folder / "out.yaml"))
    assert machine.measured and machine.device.kind == "cpu" and machine.node.network is None
    assert set(machine.device.matmul) == set(machine.device.attention) == {"float32", "bfloat16"}
    for key in ("matmul float32", "attention bfloat16", "memory", "launch", "cores", "link inside", "file system"):
        assert sum(line.startswith(key) for line in ended.stdout.splitlines()) == 1, key
    return machine


@pytest.mark.quiet
def test_two_ranks_write_what_is_measured_directly(run: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "out.yaml").write_text("before")
    machine = figures(measure(run, 2), tmp_path)
    direct = [float(word) for word in run(sys.executable, "-c", DIRECT).stdout.split()]
    found = [machine.device.matmul["float32"].flops, machine.device.memory_bandwidth]
    assert [1 / 3 < rate / other < 3 for rate, other in zip(found, direct, strict=True)] == [True, True]
    assert machine.node.ranks == 2 and 1 <= (machine.node.cores or 0) <= 2
    assert list(machine.links.group) == [2] and 0 < machine.links.group[2] < 2
    assert machine.links.between == machine.links.inside, "there is one node"
    assert machine.links.inside.latency < 0.01 and machine.links.inside.bandwidth > 1e7


@pytest.mark.slow
def test_two_nodes_have_links_between_them(run: Callable[..., Ended], tmp_path: Path) -> None:
    ended = measure(run, 4, CHECKING_JOB, "nothing")
    assert "2 node(s)" in ended.stdout and "network of a node" in ended.stdout
    machine = read_machine(str(tmp_path / "out.yaml"))
    assert machine.node.ranks == 2 and list(machine.links.group) == [2, 4]
    assert machine.links.between != machine.links.inside


@pytest.mark.exhaustive
def test_one_rank_has_its_memory_as_a_link(run: Callable[..., Ended], tmp_path: Path) -> None:
    machine = figures(measure(run, 1), tmp_path)
    assert machine.node.ranks == 1 and machine.links.group == {}
    assert machine.links.inside.bandwidth == pytest.approx(machine.device.memory_bandwidth / 2, rel=0.01)


def test_a_wrong_target_is_one_line_before_anything_is_measured(run: Callable[..., Ended]) -> None:
    ended = run(MPIEXEC, "-n", "2", sys.executable, "-m", "hpcrl", "check", "--job", "--machine", "none/out.yaml")
    assert ended.code == 2 and ended.stdout == ""
    assert ended.stderr == "hpcrl: error: --machine: there is no folder none; create it, or name another file\n"


def test_a_machine_is_measured_by_a_job(run: Callable[..., Ended]) -> None:
    ended = run(sys.executable, "-m", "hpcrl", "check", "--machine", "out.yaml")
    assert ended.code == 2 and "found --machine, which needs --job" in ended.stderr
