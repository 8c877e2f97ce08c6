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
STEPS = 30


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
    return train(tmp_path_factory.mktemp("undisturbed"))


def train(folder: Path, *before: str) -> list[dict[str, float]]:
    """Metrics of a job that saves after each step. before: what starts mpiexec."""
    checkpoint = {"async_save": True}
    config = write_config(folder, trainer={"total_training_steps": STEPS, "save_freq": 1, "checkpoint": checkpoint})
    command = [*before, MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config]
    (folder / "tmp").mkdir(exist_ok=True)
    ended = subprocess.run(
        command, cwd=folder, env=environment(TMPDIR=str(folder / "tmp")), capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    return compared(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 40))])
def test_a_second_user_changes_nothing(undisturbed: list[dict[str, float]], open_folder: Path, seed: int) -> None:
    attack = (*ATTACK, "--seed", str(seed), "--pids", str(os.getpid()), "--folders", "tmp", "runs", "--")
    assert train(open_folder, *attack) == undisturbed
    log = log_of(open_folder)
    assert "stopping" not in log and "forged" not in log
