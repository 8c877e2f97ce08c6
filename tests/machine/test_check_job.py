"""`hpcrl check --job` on healthy nodes, and on nodes with one thing wrong: which is told, with the node's name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.engine.checkpoint.manifest import write_manifest
from hpcrl.machine.check import Finding
from hpcrl.machine.check_job import Links, node_findings, nodes_of, world_findings
from hpcrl.machine.facts import Facts
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.sockets import Listener, grouped
from tests.preloaded import RANK
from tests.runtime.conftest import MPIEXEC, Ended

CHECKING_JOB = Path(__file__).with_name("checking_job.py")


@pytest.fixture
def check(run: Callable[..., Ended]) -> Callable[..., Ended]:
    return lambda *wrong, **environ: run(MPIEXEC, "-n", "4", *RANK, CHECKING_JOB, *wrong, **environ)


def told(ended: Ended) -> list[str]:
    return [line for line in ended.stdout.splitlines() if line.startswith("wrong: ")]


def test_healthy_nodes_are_one_table(check: Callable[[str], Ended], tmp_path: Path) -> None:
    ended = check("nothing")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "4 ranks on 2 node(s)" in ended.stdout and ended.stdout.endswith("ready\n")
    for line in ("  n0 ", "  n1 ", "ping ", "pairs ", "shared folder ", "the same "):
        assert ended.stdout.count(line) == 1, line
    assert "GB/s" in ended.stdout and str(tmp_path) in ended.stdout
    assert list(tmp_path.iterdir()) == [], "the canary is taken away"


def test_another_version_on_one_rank_is_named(check: Callable[[str], Ended]) -> None:
    ended = check("version")
    assert ended.code == 1, ended.stdout + ended.stderr
    (line,) = told(ended)
    assert line.startswith("wrong: torch: 2.6.0 on n1 (rank 3); the others have ")


def test_a_folder_that_one_node_does_not_share_is_named(check: Callable[[str], Ended]) -> None:
    ended = check("folder")
    assert ended.code == 1, ended.stdout + ended.stderr
    (line,) = told(ended)
    assert line.startswith("wrong: shared folder: ") and "was not seen" in line and "on n1 (ranks 2-3)" in line


def test_a_folder_that_is_not_there_on_one_node_is_named(check: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "job.yaml").write_text(json.dumps({"run": {"dir": "runs", "name": "x"}}))
    ended = check("folder", "job.yaml")
    assert ended.code == 1 and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    (line,) = told(ended)
    assert "was not seen" in line and "on n1 (ranks 2-3)" in line
    assert f"shared folder  {tmp_path / 'runs'}," in ended.stdout


def test_an_error_on_one_rank_ends_the_check_on_all(check: Callable[..., Ended]) -> None:
    ended = check("broken")
    assert ended.code != 0 and ended.stdout == ""
    assert "hpcrl: rank 3 failed" in ended.stderr and "ZeroDivisionError" in ended.stderr


def test_a_damaged_bundle_is_named(check: Callable[[str], Ended], tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "code.py").write_text("right")
    write_manifest(tmp_path / "bundle")
    assert check("nothing").code == 0
    (tmp_path / "bundle" / "code.py").write_text("wrong")
    ended = check("nothing")
    assert ended.code == 1 and "wrong: bundle: code.py differs from what was saved" in ended.stdout


def test_a_rank_that_does_not_answer_ends_the_check_and_is_seen(check: Callable[[str], Ended]) -> None:
    ended = check("dead")
    assert ended.code != 0 and "is still pinging the next rank after 3 s" in ended.stderr


def test_another_network_than_the_site_expects_is_wrong(check: Callable[..., Ended]) -> None:
    ended = check("tcp", HPCRL_FABRIC_NET="AWS Libfabric")
    assert ended.code == 1, ended.stdout + ended.stderr
    assert "  Socket; between nodes NET/Socket; on a node NET/Socket\n" in ended.stdout
    network, version = told(ended)
    assert network.startswith("wrong: network: NCCL uses TCP between nodes, and the site file expects AWS Libfabric; ")
    assert version == "wrong: NCCL: 2.21.7 on n1 (rank 3); the others have 2.20.7"


def test_an_error_of_nccl_ends_the_check_with_its_reason(check: Callable[..., Ended]) -> None:
    ended = check("plugin")
    assert ended.code != 0 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("hpcrl: error: NCCL failed: Error: network AWS Libfabric not found; put the folder")


def test_an_expectation_that_is_no_number_is_one_line(check: Callable[..., Ended]) -> None:
    ended = check("nothing", HPCRL_FABRIC_ALL_REDUCE="fast")
    assert ended.code == 2 and ended.stdout == "" and ended.stderr.startswith("hpcrl: error: found HPCRL_FABRIC_ALL_")


def findings_of(bandwidth: dict[Any, float], offsets: list[float], no_address: str | None = None) -> list[Finding]:
    fact = Facts("n", {}, "10.0.0.1 (hsn0)", no_address, "/tmp", 1 << 40)
    nodes = nodes_of(["n0", "n0", "n1", "n2"])
    return list(node_findings(nodes, [fact] * 4, Links([], bandwidth, offsets)))


def test_the_bad_node_is_marked() -> None:
    fast, level = {(0, 1): 9e9, (0, 2): 9e9, (1, 2): 9e9}, [0.0, 0.0, 0.0]
    assert [finding.wrong for finding in findings_of(fast, level)] == [None] * 3
    slow = [finding.wrong for finding in findings_of(fast | {(0, 2): 1e9, (1, 2): 1e9}, level)]
    assert slow[:2] == [None, None] and slow[2] is not None and "--exclude=n2" in slow[2]
    late = findings_of(fast, [0.0, -3.0, 90.0])
    assert [(finding.wrong is None, finding.needed) for finding in late] == [
        (True, True),
        (False, False),
        (False, True),
    ]
    assert all(finding.wrong == "no route" for finding in findings_of(fast, level, "no route"))


def test_ranks_that_are_not_one_world_are_told() -> None:
    def finding(size: int, **environ: str) -> Finding:
        return next(iter(world_findings(environ, size, "MPICH Version: 5.0.2", 2)))

    assert finding(4, SLURM_STEP_NUM_TASKS="4").wrong is None
    assert "SLURM_STEP_NUM_TASKS=8, but MPI's world has 4" in (finding(4, SLURM_STEP_NUM_TASKS="8").wrong or "")
    inside = finding(4, PMI_SIZE="4", SLURM_NTASKS="8")
    assert inside.wrong is not None and not inside.needed, "an mpiexec may leave tasks of the allocation out"


def test_a_wrong_command_line_is_one_line(run: Callable[..., Ended], tmp_path: Path) -> None:
    ended = run(MPIEXEC, "-n", "2", sys.executable, "-m", "hpcrl", "check", "--job", "none.yaml")
    assert ended.code == 2 and ended.stderr == "hpcrl: error: no such config file: none.yaml\n"


def test_what_listens_is_listed(run: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({"run": {"dir": "runs/here", "name": "x", "c10d_backend": "gloo"}}))
    ended = run(MPIEXEC, "-n", "2", sys.executable, "-m", "hpcrl", "check", "--job", "job.yaml")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert f"shared folder  {tmp_path}," in ended.stdout, "the nearest folder that is there"
    here = re.escape(node_name())
    found = re.findall(rf"^. listens +(\S.*?) on {here}, ([\d.]+), port (\d+(?:, \d+)*)$", ended.stdout, re.M)
    assert [(owner, host, ports.count(",")) for owner, host, ports in found] == [
        ("mpiexec", "0.0.0.0", 0),
        ("gloo", "127.0.0.1", 1),
    ]
    assert ended.stdout.count("note: listens: mpiexec listens for other nodes too") == 1


def test_processes_that_share_a_socket_count_once_and_ports_are_few() -> None:
    inherited = [Listener("n0", "mpiexec", ("0.0.0.0", 7), "1") for _ in range(3)]
    of_ranks = [Listener(f"n{rank % 2}", "MPI", ("10.0.0.3", 100 + rank), str(rank)) for rank in range(20)]
    assert [str(group) for group in grouped([*inherited, *of_ranks])] == [
        "mpiexec on n0, 0.0.0.0, port 7",
        "MPI on n0, 10.0.0.3, port 100, 102, 104, 106, 108, 110, 112, 114 and 2 more",
        "MPI on n1, 10.0.0.3, port 101, 103, 105, 107, 109, 111, 113, 115 and 2 more",
    ]
