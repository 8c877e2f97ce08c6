"""Which MPI library this is, and whether the launcher speaks its language. Strings only: nothing here calls MPI."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping


def library_name(version: str) -> str:
    """'MPICH 5.0.2' from what MPI_Get_library_version says."""
    first = version.replace("\x00", "").strip().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def split_world(environ: Mapping[str, str], size: int, library: str) -> str | None:
    """What is wrong when the launcher started several ranks and MPI made each of them a world of its own; else None.

    The launcher closest to the rank knows best: under mpiexec inside a Slurm job, Slurm's variables describe mpiexec.
    """
    if size > 1:
        return None
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        count = environ.get(name, "")
        if not count.isdigit():
            continue
        if int(count) <= 1:
            return None
        mpich = "MPICH" in library.upper()
        if name == "SLURM_NTASKS":
            return (
                f"this job has {count} tasks ({name}={count}) but one process was started, without srun: its MPI world "
                f"has size 1; start it with `srun {srun_flag(mpich)} python -m hpcrl ...`, or with `mpiexec -n 1` when "
                "one rank is meant"
            )
        return (
            f"{count} ranks were started ({name}={count}) but each is an MPI world of its own, of size 1: the launcher "
            f"and the MPI library ({library_name(library)}) do not speak the same process-management interface; start "
            f"with `srun {srun_flag(mpich)} ...`, or with the mpiexec of the same MPI library "
            f"({os.path.join(sys.prefix, 'bin', 'mpiexec')})"
        )
    return None


def srun_flag(mpich: bool) -> str:
    return "--mpi=pmi2" if mpich else "--mpi=pmix"


def node_name() -> str:
    """As Slurm calls it, so that a person can exclude it; else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()
