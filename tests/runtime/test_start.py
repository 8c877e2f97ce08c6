"""What start-up derives from the environment, and the classic of N ranks that are N worlds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.runtime.gpus import rank_threads
from hpcrl.runtime.launcher import on_one_node, split_world
from hpcrl.runtime.world import prepare_environment

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
    ("size", "rank"),
    [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_NTASKS", "SLURM_PROCID")],
)
def test_split_worlds_end_with_one_line_before_anything_runs(run: Callable, size: str, rank: str) -> None:
    small_job = Path(__file__).with_name("small_job.py")
    first = run(sys.executable, small_job, "ok", **{size: "3", rank: "0"})
    other = run(sys.executable, small_job, "ok", **{size: "3", rank: "1"})
    assert (first.code, other.code) == (2, 2)
    lines = [line for line in first.stderr.splitlines() if line.startswith("hpcrl: error:")]
    assert len(lines) == 1 and f"{size}=3" in lines[0]
    assert "Traceback" not in first.stderr and "hpcrl" not in other.stderr


def test_threads_are_an_even_share_of_the_cores() -> None:
    assert rank_threads({}, cores=96, local_size=8) == 12
    assert rank_threads({}, cores=2, local_size=4) == 1
    assert rank_threads({"OMP_NUM_THREADS": "3"}, cores=96, local_size=8) == 3


def test_threads_of_a_rank_that_srun_has_bound_to_its_own_cores() -> None:
    assert rank_threads({"SLURM_CPUS_PER_TASK": "12"}, cores=12, local_size=8) == 12


def test_loopback_is_the_default_on_one_node_only() -> None:
    one: dict[str, str] = {}
    prepare_environment(one)
    assert one["UCX_NET_DEVICES"] == one["NCCL_SOCKET_IFNAME"] == "lo" and one["HF_HUB_OFFLINE"] == "1"
    assert one["UCX_TLS"] == "^tcp"
    several = {"SLURM_JOB_NUM_NODES": "2", "HF_HUB_OFFLINE": "0"}
    prepare_environment(several)
    assert (
        not several.keys() & {"UCX_NET_DEVICES", "UCX_TLS", "NCCL_SOCKET_IFNAME"} and several["HF_HUB_OFFLINE"] == "0"
    )


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "4", "SLURM_JOB_NUM_NODES": "2"}, True),
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "8"}, False),  # mpiexec -hosts a,b
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "2"}, True),  # srun -N 1
        ({"PMI_SIZE": "4"}, False),  # a launcher that does not say
    ],
)
def test_one_node_is_read_from_the_launcher(environ: dict[str, str], one: bool) -> None:
    assert on_one_node(environ) is one
