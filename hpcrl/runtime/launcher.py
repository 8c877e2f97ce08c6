"""What the launcher and the batch system set for a process: its rank and node, and whether MPI found the other ranks.

Nothing here calls MPI.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata

SQUEUE_TIMEOUT = 20.0  # seconds, for a busy slurmctld


def node_name() -> str:
    """Name of this node: Slurm's, so that it can be excluded from a job, otherwise the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def format_spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in the notation of CPU lists and pools of ranks: (0, 1, 2, 3, 6) is "0-3,6"."""
    groups = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    spans = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def version_of(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def launched_rank(environ: Mapping[str, str]) -> str | None:
    """This process's rank according to the launcher, or None without a launcher."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if name in environ:
            return environ[name]
    return None


def is_first_launched(environ: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 according to the launcher: before MPI starts, only that one prints."""
    return launched_rank(environ) in (None, "0")


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this node, according to the launcher: this is needed before MPI starts."""
    for here, all_ranks in (("MPI_LOCALNRANKS", "PMI_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if here in environ and all_ranks in environ:
            return environ[here] == environ[all_ranks]
    nodes = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_JOB_NUM_NODES"))
    if nodes is not None:
        return nodes == "1"
    return not any(name in environ for name in ("PMI_SIZE", "PMIX_RANK"))  # started without a launcher


def start_of_ranks(environ: Mapping[str, str], size: int) -> str:
    """The start of a command line for so many ranks, with the launcher that started this one; "" without a launcher."""
    if launched_rank(environ) is None:
        return ""
    return f"srun -n {size}" if "SLURM_STEP_ID" in environ else f"mpiexec -n {size}"


def library_name(version: str) -> str:
    """'MPICH 5.0.2' from the string that MPI_Get_library_version returns."""
    first = version.replace("\x00", "").strip().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def split_world(environ: Mapping[str, str], size: int, library: str) -> str | None:
    """Error text if the launcher started several ranks and each of them is an MPI world of its own, otherwise None.

    Variables of the launcher closest to the rank count: under mpiexec inside a Slurm job, Slurm's variables describe
    mpiexec.
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
            f"and the MPI library ({library_name(library)}) do not use the same process-management interface; start "
            f"with `srun {srun_flag(mpich)} ...`, or with the mpiexec of the same MPI library "
            f"({os.path.join(sys.prefix, 'bin', 'mpiexec')})"
        )
    return None


def srun_flag(mpich: bool) -> str:
    return "--mpi=pmi2" if mpich else "--mpi=pmix"


GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"  # read by Cray MPICH only
BESIDE_NCCL = (
    f"{GPU_SUPPORT}=1: GPU-aware Cray MPICH beside NCCL can deadlock, and MPI carries host buffers only; "
    f"`export {GPU_SUPPORT}=0`"
)


def asks_for_gpu_support(environ: Mapping[str, str]) -> bool:
    return environ.get(GPU_SUPPORT, "0") not in ("", "0")


def is_cray(library: str) -> bool:
    """Whether it is Cray MPICH.

    Args:
        library: the string that MPI_Get_library_version returns, also before MPI_Init.
    """
    return "CRAY MPICH" in library.upper()


def lacks_gpu_support(loaded: Iterable[str]) -> str | None:
    """Error text if Cray MPICH would abort in MPI_Init because of `GPU_SUPPORT`, otherwise None.

    Cray MPICH needs its GTL library, which its compiler wrappers link into programs; the interpreter of Python and
    mpi4py are often built without them.

    Args:
        loaded: paths of the process's shared libraries.
    """
    if any(os.path.basename(path).startswith("libmpi_gtl_") for path in loaded):
        return None
    return (
        f"found {GPU_SUPPORT}=1, and Cray MPICH aborts because libmpi_gtl_cuda.so or libmpi_gtl_hsa.so is not loaded; "
        f"expected 0, because MPI carries host buffers only: `export {GPU_SUPPORT}=0`"
    )


def loaded_libraries() -> list[str]:
    """Paths of the shared libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    return [path for path in dict.fromkeys(paths) if ".so" in os.path.basename(path)]


def slurm_pmi1(environ: Mapping[str, str]) -> bool:
    """Whether MPI starts over Slurm's pmi2 plugin: PMI_FD is its socket, over which MPICH sends PMI-1 requests."""
    return "PMI_FD" in environ and "SLURM_STEP_ID" in environ


def end_of_allocation(environ: Mapping[str, str]) -> float | None:
    """End of the allocation in seconds since the epoch, or None without a batch system.

    Reads HPCRL_END_TIME, which the templates export because compute nodes may lack squeue, then the variable of newer
    versions of Slurm. Otherwise starts squeue, so call it before MPI starts.
    """
    for name in ("HPCRL_END_TIME", "SLURM_JOB_END_TIME"):
        if environ.get(name, "").isdigit():
            return float(environ[name])
    return _ask_slurm(environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environ else None


def _ask_slurm(job: str) -> float | None:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT).stdout.strip()
        return datetime.fromisoformat(output).timestamp()  # in the local time zone, as squeue prints it
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
