from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.sandbox.fork_server import without_launcher_variables
from tests.runtime.conftest import run, run_job, start  # noqa: F401  # fixtures


def test_launchers_variables_are_taken_away_and_others_stay() -> None:
    launchers = ["PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_LOCALRANKID"]
    assert without_launcher_variables(dict.fromkeys([*launchers, "HOME", "OMP_NUM_THREADS"], "1")).keys() == {
        "HOME",
        "OMP_NUM_THREADS",
    }


def test_children_of_a_rank_do_not_take_themselves_for_ranks(run_job: Callable, tmp_path: Path) -> None:  # noqa: F811
    assert run_job(2, "environment", SLURM_JOB_ID="7").code == 0
    for rank in range(2):
        names = (tmp_path / f"environment.{rank}").read_text().split()
        assert "PATH" in names
        assert not [name for name in names if name.startswith(("PMI", "MPI_", "SLURM_", "OMPI_", "HYDRA", "MPICH"))]


RANK = """
import time
from multiprocessing import util
from hpcrl.sandbox import fork_server

if __name__ == "__main__":
    fork_server.start()
    print(util.get_temp_dir(), flush=True)
    time.sleep(1000)
"""


def wait_until_empty(folder: Path) -> None:
    give_up = time.monotonic() + 20
    while list(folder.glob("pymp-*")):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_job_leaves_no_files_of_its_children(run_job: Callable, tmp_path: Path) -> None:  # noqa: F811
    assert run_job(2, "environment", TMPDIR=str(tmp_path)).code == 0
    assert not list(tmp_path.glob("pymp-*"))


def test_nor_does_an_aborted_job(run_job: Callable, tmp_path: Path) -> None:  # noqa: F811
    assert run_job(3, "raise", TMPDIR=str(tmp_path)).code == 1
    wait_until_empty(tmp_path)


def test_nor_does_a_rank_that_is_killed(start: Callable, tmp_path: Path) -> None:  # noqa: F811
    rank: subprocess.Popen[str] = start(sys.executable, "-c", RANK, TMPDIR=str(tmp_path))
    assert rank.stdout is not None
    assert Path(rank.stdout.readline().strip()).parent == tmp_path
    rank.send_signal(signal.SIGKILL)
    wait_until_empty(tmp_path)
