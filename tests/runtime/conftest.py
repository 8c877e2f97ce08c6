"""Starting small jobs under mpiexec, as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hpcrl.sandbox.fork_server import without_launcher_variables
from tests import preloaded

REPOSITORY = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
SMALL_JOB = Path(__file__).with_name("small_job.py")


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    """This process's environment without launchers' variables, with one thread per rank and the server of ranks."""
    here = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HPCRL_TEST_SERVER": preloaded.server()}
    return without_launcher_variables(dict(os.environ)) | here | more


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("mpiexec", "-n", "3", ...)`: a process in tmp_path; what is left of it is killed when the test ends."""
    started: list[psutil.Process] = []

    def start(*command: str | Path, **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=tmp_path,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(psutil.Process(process.pid))
        return process

    yield start
    for process in started:
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in family:
            with suppress(psutil.NoSuchProcess):  # ended, because its parent has
                member.kill()


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ended]:
    """`run("python", "x.py")`: start, and wait for the end, or for at most five minutes."""

    def run(*command: str | Path, **more: str) -> Ended:
        begin = time.monotonic()
        process = start(*command, **more)
        stdout, stderr = process.communicate(timeout=300)
        return Ended(process.returncode, stdout, stderr, time.monotonic() - begin)

    return run


@pytest.fixture
def run_job(run: Callable[..., Ended]) -> Callable[..., Ended]:
    """`run_job(3, "raise")`: small_job.py in one of its modes on that many ranks; its run directory is ./runs/small."""

    def run_job(ranks: int, mode: str, **more: str) -> Ended:
        return run(MPIEXEC, "-n", str(ranks), *preloaded.RANK, SMALL_JOB, mode, **more)

    return run_job
