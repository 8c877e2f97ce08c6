"""A job beside a second user who attacks it from before its start until its end: its metrics stay the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import RANK
from tests.run.small_run import compared, log_of, write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

ATTACK = (sys.executable, str(REPOSITORY / "tools" / "attack_neighbour.py"))
# Rank 1 connects after rank 0 has closed the connection of another program.
LATE = """
import time
from pathlib import Path
from hpcrl import cli
from hpcrl.runtime import key_value_store

connect = key_value_store.connect

def connect_late(address, secret):
    give_up = time.monotonic() + 60
    log = Path("runs", "ends", "logs", "rank_00000.log")
    while time.monotonic() < give_up and not (log.exists() and "did not send this job's secret" in log.read_text()):
        time.sleep(0.1)
    return connect(address, secret)

if __name__ == "__main__":
    key_value_store.connect = connect_late
    cli.main(["train", "job.yaml"])
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user may make files, as the temporary folder of a node."""
    with tempfile.TemporaryDirectory(prefix="attacked_", dir="/tmp") as name:
        folder = Path(name)
        for path in (folder, folder / "tmp", folder / "runs"):
            path.mkdir(exist_ok=True)
            path.chmod(0o1777)
        yield folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tmp").mkdir()
    return train(folder)[0]


def train(folder: Path, *before: str) -> tuple[list[dict[str, float]], str]:
    """Metrics and output of a job that saves after each step. before: what starts mpiexec."""
    if before:
        (folder / "late.py").write_text(LATE)
    run = {"name": "ends", "dir": str(folder / "runs"), "c10d_backend": "gloo"}  # gloo's ports are open until the end
    write_config(folder, run=run, trainer={"total_training_steps": 12, "save_freq": 1})
    command = [*before, MPIEXEC, "-n", "2", *RANK, *(["late.py"] if before else ["-m", "hpcrl", "train", "job.yaml"])]
    ended = subprocess.run(
        command, cwd=folder, env=environment(TMPDIR=str(folder / "tmp")), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return compared(folder), ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 80))])
def test_a_second_user_changes_nothing(undisturbed: list[dict[str, float]], open_folder: Path, seed: int) -> None:
    attack = (*ATTACK, "--seed", str(seed), "--pids", str(os.getpid()), "--folders", "tmp", "runs", "--")
    metrics, printed = train(open_folder, *attack)
    print(printed)
    assert metrics == undisturbed
    log = log_of(open_folder)
    assert "stopping" not in log and "forged" not in log
    assert "did not send this job's secret" in log, "no attack came before rank 1"
