"""tests/mpi/conftest.py keeps the ranks of a test session in step: what one rank meets, all end with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preloaded import RANK

REPOSITORY = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
ILL = "AssertionError: rank one is ill"

ONE_RANK_FAILS = """
def test_it(world):
    print("seen before")
    assert world.rank != 1, "rank one is ill"

def test_next(world):
    world.barrier()
"""
ONE_FIXTURE_FAILS = """
import pytest

@pytest.fixture
def broken(world):
    assert world.rank != 1, "rank one is ill"

def test_it(broken, world):
    world.barrier()
"""
OTHERS_HANG = """
def test_it(world):
    assert world.rank != 1, "rank one is ill"
    world.barrier()
    world.barrier()
"""
OTHER_TESTS = """
import os
assert os.environ["PMI_RANK"] != "1", "rank one is ill"
def test_it(world): pass
"""
ALL_HANG = """
import time
def test_it(world):
    time.sleep(1000)
"""
ONE_SKIPS = """
import pytest
def test_it(world):
    if world.rank == 1:
        pytest.skip("rank one is ill")
"""


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        pytest.param(ONE_RANK_FAILS, [ILL, "seen before", "1 failed, 1 passed"], id="one rank fails"),
        pytest.param(ONE_FIXTURE_FAILS, [ILL, "1 error"], id="one rank's fixture fails"),
        pytest.param(OTHERS_HANG, [ILL, "the other ranks did not come"], id="one rank fails, the others wait for it"),
        pytest.param(OTHER_TESTS, [ILL, "rank 1 collected other tests"], id="one rank cannot import"),
        pytest.param(ONE_SKIPS, ["the ranks differ: rank 0 passed, rank 1 skipped"], id="one rank skips"),
        pytest.param(ALL_HANG, ["Timeout", "test_it.py"], id="all ranks hang", marks=pytest.mark.slow),
    ],
)
def test_trouble_on_one_rank_fails_the_session(run: Callable, tmp_path: Path, tests: str, told: list[str]) -> None:
    shutil.copy(REPOSITORY / "tests" / "mpi" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(tests)
    # Both ranks of ALL_HANG end at once, and mpiexec may kill a process that stands for one before it has its code.
    python = (sys.executable,) if tests == ALL_HANG else RANK
    pytest_command = [*python, "-m", "pytest", "-q", "-c", REPOSITORY / "pyproject.toml", "--rootdir", tmp_path]
    seconds = "3" if tests == ALL_HANG else "100"
    ended = run(MPIEXEC, "-n", "2", *pytest_command, tmp_path / "test_it.py", HPCRL_TEST_SECONDS=seconds)
    assert ended.code == 1, ended.stdout + ended.stderr
    for words in told:
        assert words in ended.stdout + ended.stderr
    assert ended.seconds < 90
