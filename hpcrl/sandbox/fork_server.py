"""Child processes of a rank: from multiprocessing's forkserver, started before MPI, gone when the rank is gone.

MPI and CUDA do not survive a fork, and a child that inherits a launcher's variables takes itself for a rank.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
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
F_SETSIG = 10  # Linux's number; Python names it from 3.11 on where the platform has it


def cleaned(environ: dict[str, str]) -> dict[str, str]:
    """`environ` without what launchers put there for ranks."""
    return {name: value for name, value in environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


def start() -> None:
    """Start the server that all children are forked from. Before MPI: nothing of it is in the server then."""
    full = dict(os.environ)
    # by default it would import the program's main module
    context().set_forkserver_preload(["hpcrl.sandbox.fork_server_preload"])
    os.environ[FOLDER] = util.get_temp_dir()
    try:
        for name in full.keys() - cleaned(full).keys():
            del os.environ[name]
        forkserver.ensure_running()
    finally:
        del os.environ[FOLDER]
        os.environ.update(full)


def bind(cpus: Iterable[int]) -> None:
    """Let children that are started from now on run on these CPUs only."""
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        os.sched_setaffinity(server, cpus)


def remove_files() -> None:
    """Removes what multiprocessing keeps on disk for this rank; no child can be started after it.

    For a rank that ends without Python's exit hooks. The server does the same when its rank was killed.
    """
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)


def context() -> ForkServerContext:
    """The multiprocessing context for every child: `context().Process(...)`, `ProcessPoolExecutor(mp_context=...)`."""
    return multiprocessing.get_context("forkserver")


def spawn(target: Callable[..., Any], args: tuple[Any, ...]) -> ForkServerProcess:
    """Start a child that runs `target(*args)`, named in an importable module, and does not load this program's main
    module, as multiprocessing would have it: that may take seconds, and need a guard which people forget."""
    # Not daemonic: a daemonic process may not have children.
    child = context().Process(target=target, args=args, daemon=False)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        child.start()
    finally:
        sys.modules["__main__"] = main
    return child


def die_with_parent() -> None:
    """Have the kernel kill this child when its rank goes. What the child starts itself needs `supervisor.supervise`.

    A child calls it first: as the first line of its target, or as `initializer=` of a process pool. Without it a child
    that never returns would outlive a rank that got `kill -9`. PR_SET_PDEATHSIG is no help: the parent is the fork
    server, which lives while a child does, as each child holds the pipe whose end it waits for. The sentinel is a pipe
    that only the rank holds open; the kernel sends SIGKILL when that closes, whatever the child is doing. Ctrl-C
    reaches every process of a job; it is the rank that answers it, so the child does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if rank is None:
        return
    sentinel = rank.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not rank.is_alive():  # it went before the kernel was asked
        os._exit(1)
