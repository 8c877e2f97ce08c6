"""Two starts of one run on two nodes of Slurm, whose file system is shared and whose processes are not visible."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import RANK
from tests.run.owner_races import race, write_job
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import environment, lines


@pytest.fixture(scope="module")
def allocation(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, str]]:
    """Both nodes, as of a person who starts steps by hand, and the job's id."""
    folder = tmp_path_factory.mktemp("allocation")
    (folder / "job.sh").write_text("#!/bin/sh\nsleep 3600\n")
    lab = environment(lab, folder)
    job = lab.sbatch(["--nodes=2", "--ntasks-per-node=2", "--output=job.out", "job.sh"], cwd=folder)
    lab.until(lambda: lab.state(job) == "RUNNING", "running", job)
    yield lab, job
    lab.run("scancel", job)
    lab.wait(job)


def step(lab: Lab, job: str, node: int, folder: Path, config: Path, name: str) -> subprocess.Popen[str]:
    srun = ["srun", f"--jobid={job}", "--overlap", "--mpi=pmi2", "--nodes=1", "--ntasks=2", f"--nodelist=n{node}"]
    command = [*srun, "--kill-on-bad-exit=1", *RANK, "-m", "hpcrl", "train", str(config), f"run.name={name}"]
    environ = lab.env | {"OWNER_LOG": str(folder / "owner_log")}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environ, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def whole(allocation: tuple[Lab, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the small job without a race."""
    folder = tmp_path_factory.mktemp("whole")
    started = step(*allocation, 0, folder, write_job(folder), "whole")
    said = started.communicate(timeout=120)
    assert started.returncode == 0, said
    return lines(folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [n if n < 5 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(100)])
def test_two_starts_at_a_random_distance(
    allocation: tuple[Lab, str], whole: list[dict[str, Any]], tmp_path: Path, number: int
) -> None:
    config, began = write_job(tmp_path), time.monotonic()
    found = race(tmp_path, lambda n, name: step(*allocation, n % 2, tmp_path, config, name), whole, number)
    print(found, f"{time.monotonic() - began:.1f} s")
