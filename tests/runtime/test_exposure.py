"""Nobody else on the machine or the network gets at a running job, or at what it has written."""

from __future__ import annotations

import ast
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import hpcrl
from hpcrl.runtime.sockets import listening
from hpcrl.runtime.store import PROBES, interface_address, reachable
from tests.run.small_run import open_to_others, write_config
from tests.run.test_ends import BUSY
from tests.runtime.conftest import MPIEXEC, start  # noqa: F401  # fixtures


def family_when(process: psutil.Popen, folder: Path, pattern: str, count: int) -> list[psutil.Process]:
    """Every descendant of mpiexec once so many files are there."""
    give_up = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < give_up, f"no {pattern}"
        time.sleep(0.1)
    return psutil.Process(process.pid).children(recursive=True)


def addresses(process: psutil.Popen, family: list[psutil.Process]) -> dict[int, set[str]]:
    """Where ranks and their children listen. MPICH's launcher listens everywhere, and leaves that socket to them."""
    of_launcher = listening(process.pid)
    found = {}
    for member in family:
        mine = {host for inode, (host, _) in listening(member.pid).items() if inode not in of_launcher}
        if mine:
            found[member.pid] = mine
    return found


def test_three_modules_listen() -> None:
    """A place that listens is one that other users reach: it needs a secret, or a line in docs/security.md."""
    package, calls = Path(hpcrl.__file__).parent, {"create_server", "start_server", "serve_forever", "TCPStore"}
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in calls:
                found.add(path.relative_to(package).as_posix())
    assert found == {"runtime/key_value_store.py", "runtime/store.py", "rollout/environments/chat_server.py"}


@pytest.mark.slow
def test_a_job_on_one_node_does_not_listen_and_writes_for_its_user_alone(start: Callable, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "score.py").write_text(BUSY.replace('"metrics.jsonl"', '"checkpoints" / "latest"'))
    function = {"path": str(tmp_path / "score.py"), "reward_kwargs": {"folder": str(tmp_path)}}
    config = write_config(
        tmp_path,
        trainer={"total_training_steps": 2, "save_freq": 1, "checkpoint": {"async_save": False}, "profile_steps": [1]},
        reward={"custom_reward_function": function, "num_workers": 1, "timeout": 600},
    )
    before = os.umask(0o022)  # of a user who has not thought about it
    try:
        process = start(MPIEXEC, "-n", "2", sys.executable, "-m", "hpcrl", "train", config)
    finally:
        os.umask(before)
    family = family_when(process, tmp_path, "busy.*", 2)

    found = addresses(process, family)
    assert found == {}

    run = tmp_path / "runs" / "ends"
    written = {"checkpoints", "config.yaml", "logs", "metrics.jsonl", "profile", "rollouts", "tensorboard", "trace"}
    assert written <= {path.name for path in run.iterdir()}
    assert open_to_others(run) == []


def test_ranks_of_several_nodes_listen_on_the_address_that_leads_to_the_others(start: Callable, tmp_path: Path) -> None:  # noqa: F811
    outside = reachable(interface_address(probe) for probe in PROBES)
    if outside is None:
        pytest.skip("this machine has no interface but loopback")
    process = start(MPIEXEC, "-n", "2", sys.executable, Path(__file__).with_name("several_nodes_job.py"))
    family = family_when(process, tmp_path, "waiting.*", 2)
    found = set.union(*addresses(process, family).values())
    assert outside in found
    assert found <= {outside, "127.0.0.1"}
