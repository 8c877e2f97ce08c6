"""The import of tensorrt_llm, which is a collective of MPI's world and works with one MPI library.

Importing it splits MPI_COMM_WORLD by a constant that only Open MPI has, so that every rank must import it at the same
point, and other libraries hang or abort. Nobody has run this with the package yet.
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


def refusal(library: str, thread_multiple: bool) -> str | None:
    """What keeps TensorRT-LLM from this MPI in one line, or None. `library` is what MPI_Get_library_version says."""
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


def absence() -> str | None:
    """Why the package cannot be imported, found without importing it, or None."""
    if importlib.util.find_spec(PACKAGE) is None:
        return (
            "tensorrt-llm is not installed: run in TensorRT-LLM's container (its release 1.2.1), or use "
            "rollout.engine=native"
        )
    return None


def import_on_all_ranks(comm: MPI.Intracomm) -> None:
    """Import tensorrt_llm on every rank of MPI's world, which `comm` must span. Collective.

    Raises InputError on all ranks alike where MPI or a missing package forbids it on any of them. When the import
    itself fails the others may spin in it: that is an InputError of this rank alone (not `everywhere`), to be answered
    by `world.abort`.
    """
    from mpi4py import MPI

    def check() -> None:
        why = refusal(MPI.Get_library_version(), MPI.Query_thread() == MPI.THREAD_MULTIPLE) or absence()
        if why is not None:
            raise InputError(why)

    run_collectively(comm, check)
    barrier(comm)  # the import spins until all ranks are in it
    load()


def load() -> None:
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # a missing library, an MPI of another build: whatever it is, the user's installation
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"tensorrt_llm cannot be imported: {why}; mend its installation, or use rollout.engine=native"
        ) from error
