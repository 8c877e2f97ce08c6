"""What start-up derives from the environment, and the classic of N ranks that are N worlds."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from hpcrl.launch.world import prepare_environment, rank_threads, split_world

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},  # mpiexec -n 1 inside a Slurm job
        {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},  # srun -n 1 inside a larger job
    ],
)
def test_one_rank_alone_is_fine_where_one_was_started(environ: dict[str, str]) -> None:
    assert split_world(environ, 1, MPICH) is None


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
def test_a_world_of_one_among_many_started_is_named(name: str) -> None:
    line = split_world({name: "4"}, 1, MPICH)
    assert line is not None and f"{name}=4" in line and "--mpi=pmi2" in line and "mpiexec" in line
    assert "--mpi=pmix" in (split_world({name: "4"}, 1, OPEN_MPI) or "")
    assert split_world({name: "4"}, 4, MPICH) is None


@pytest.mark.parametrize(
    "environ",
    [{"PMI_SIZE": "3"}, {"OMPI_COMM_WORLD_SIZE": "3"}, {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}],
)
def test_a_split_world_is_refused_before_anything_runs(run: Callable, environ: dict[str, str]) -> None:
    from conftest_launch import SMALL_JOB  # placeholder
