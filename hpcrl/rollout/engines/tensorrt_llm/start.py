"""The collective import of tensorrt_llm.

It splits MPI_COMM_WORLD when it is imported, by a constant that only Open MPI has: every rank must import it at the
same point, and other MPI libraries hang or abort.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import library_name
from hpcrl.runtime.mpi import barrier, run_collectively

if TYPE_CHECKING:
    from mpi4py import MPI

PACKAGE = "tensorrt_llm"


def unsupported_mpi(library: str, thread_multiple: bool) -> str | None:
    """Error text if TensorRT-LLM cannot use this MPI, otherwise None. `library`: from MPI_Get_library_version."""
    if not library.startswith("Open MPI"):
        return (
            f"TensorRT-LLM needs Open MPI, and mpi4py found {library_name(library)}: run in TensorRT-LLM's container "
            "with its own mpi4py and `srun --mpi=pmix`, or use rollout.engine=native"
        )
    if not thread_multiple:
        return (
            "TensorRT-LLM calls MPI from a thread of its own, and this Open MPI gives less than MPI_THREAD_MULTIPLE; "
            "use one that is built with it, or rollout.engine=native"
        )
    return None


def missing_package() -> str | None:
    """Error text if the package is not installed, otherwise None. Does not import it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return (
            "tensorrt-llm is not installed: run in TensorRT-LLM's container (its release 1.2.1), or use "
            "rollout.engine=native"
        )
    return None


def import_on_all_ranks(comm: MPI.Intracomm) -> None:
    """Import tensorrt_llm on every rank of MPI's world, which `comm` must span. Collective.

    Raises InputError on all ranks if MPI is unsupported or the package is missing on any of them. If the import itself
    fails, the other ranks may spin in it: then only this rank raises InputError (not `everywhere`), and must call
    `world.abort`.
    """
    from mpi4py import MPI

    def check() -> None:
        why = unsupported_mpi(MPI.Get_library_version(), MPI.Query_thread() == MPI.THREAD_MULTIPLE) or missing_package()
        if why is not None:
            raise InputError(why)

    run_collectively(comm, check)
    barrier(comm)  # the import spins until all ranks have begun it
    load()


def load() -> None:
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # such as a missing library: a fault of the user's installation
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"tensorrt_llm cannot be imported: {why}; correct its installation, or use rollout.engine=native"
        ) from error
