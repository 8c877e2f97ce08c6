from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcrl.launch.children import cleaned


def test_launchers_variables_are_taken_away_and_others_stay() -> None:
    launchers = ["PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPI_LOCALRANKID"]
    assert cleaned(dict.fromkeys([*launchers, "HOME", "OMP_NUM_THREADS"], "1")).keys() == {"HOME", "OMP_NUM_THREADS"}


def test_children_of_a_rank_do_not_take_themselves_for_ranks(run_job: Callable, tmp_path: Path) -> None:
    assert run_job(2, "environment", SLURM_JOB_ID="7").code == 0
    for rank in range(2):
        names = (tmp_path / f"environment.{rank}").read_text().split()
        assert "PATH" in names
        assert not [name for name in names if name.startswith(("PMI", "MPI_", "SLURM_", "OMPI_", "HYDRA", "MPICH"))]
