"""Child processes of a rank, forked by multiprocessing's fork server, which is started before MPI.

MPI and CUDA do not survive a fork, and a child that inherits a launcher's variables would be taken for a rank.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

LAUNCHER_PREFIXES = (
    "PMI_",
    "PMI2_",
    "PMIX",
    "PALS_",
    "OMPI_",
    "PRTE",
    "SLURM_",
    "MPICH",
    "MPIR_",
    "MPI_",
    "HYDRA",
)
FOLDER = "HPCRL_CHILDREN_FOLDER"  # an environment variable of the server only


def without_launcher_variables(environ: dict[str, str]) -> dict[str, str]:
    """`environ` without the variables that launchers set for ranks."""
    return {name: value for name, value in environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


def start() -> None:
    """Start the server that all children are forked from. Call it before MPI starts, so that the server has no MPI."""
    full = dict(os.environ)
    # by default the server imports the program's main module
    context().set_forkserver_preload(["hpcrl.sandbox.fork_server_preload"])
    os.environ[FOLDER] = util.get_temp_dir()
    try:
        for name in full.keys() - without_launcher_variables(full).keys():
            del os.environ[name]
        forkserver.ensure_running()
    finally:
        del os.environ[FOLDER]
        os.environ.update(full)


def bind(cpus: Iterable[int]) -> None:
    """Bind children that are started from now on to these CPUs."""
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        os.sched_setaffinity(server, cpus)


def remove_files() -> None:
    """Remove multiprocessing's files of this rank. No child can be started afterwards.

    For a rank that ends without Python's exit hooks. If the rank is killed, the server removes them.
    """
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)


def context() -> ForkServerContext:
    """The multiprocessing context for every child: `context().Process(...)`, `ProcessPoolExecutor(mp_context=...)`."""
    return multiprocessing.get_context("forkserver")


def spawn(target: Callable[..., Any], args: tuple[Any, ...]) -> ForkServerProcess:
    """Start a child that runs `target(*args)`, a function of an importable module.

    Unlike multiprocessing's own children, it does not import this program's main module, which may take seconds and
    needs an `if __name__ == "__main__"`.
    """
    # not daemonic, because a daemonic process may not have children
    child = context().Process(target=target, args=args, daemon=False)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        child.start()
    finally:
        sys.modules["__main__"] = main
    return child
