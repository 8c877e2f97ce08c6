"""Child processes of a rank, forked by multiprocessing's fork server, which is started before MPI.

MPI and CUDA do not survive a fork, and a child that inherits a launcher's variables would be taken for a rank.

The server preloads this module. Batch systems send signals to every process of a job: the server ignores them; its
children start with the defaults and an empty mask, so that they can be terminated, and `worker.supervise` installs its
own handlers. A rank that was killed removes no files. Its temporary files are removed when the server ends, which is
when the rank and all of its children have ended.
"""

from __future__ import annotations

import atexit
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

from hpcrl.sandbox import new_files
from hpcrl.sandbox.process_tree import STEP_SIGNALS, STOP_SIGNALS

LAUNCHER_PREFIXES = ("PMI_", "PMI2_", "PMIX", "PALS_", "OMPI_", "PRTE", "SLURM_", "MPICH", "MPIR_", "MPI_", "HYDRA")
FOLDER = "HPCRL_CHILDREN_FOLDER"  # an environment variable of the server only
_umask: int | None = None  # of children; None: the server's


def without_launcher_variables(environ: dict[str, str]) -> dict[str, str]:
    """`environ` without the variables that launchers set for ranks."""
    return {name: value for name, value in environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


def start() -> None:
    """Start the server that all children are forked from. Call it before MPI starts, so that the server has no MPI.

    In the main thread. Ctrl-C reaches all processes of a job, and only the rank handles it: the server and its children
    ignore SIGINT from their first moment on.
    """
    full = dict(os.environ)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # by default the server imports the program's main module
    context().set_forkserver_preload([__name__])
    os.environ[FOLDER] = new_files.make_temporary_folder()
    try:
        for name in full.keys() - without_launcher_variables(full).keys():
            del os.environ[name]
        forkserver.ensure_running()
    finally:
        del os.environ[FOLDER]
        os.environ.update(full)
        signal.signal(signal.SIGINT, handler)


def set_umask(mask: int) -> None:
    """Set the umask of this process, and of children that are started from now on."""
    global _umask
    _umask = mask
    os.umask(mask)


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
    util.get_temp_dir()  # made here, else each child makes one
    # not daemonic, because a daemonic process may not have children
    child = context().Process(target=_run, args=(_umask, target, args), daemon=False)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        child.start()
    finally:
        sys.modules["__main__"] = main
    return child


def _run(umask: int | None, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if umask is not None:
        os.umask(umask)
    target(*args)


def _prepare_server() -> None:
    """Make this process, which is the server, ignore signals and remove files."""
    folder, server = os.environ.pop(FOLDER), os.getpid()
    new_files.keep_temporary_folder(folder)
    os.setpgid(0, 0)  # MPICH's launcher ends an aborted job by killing the ranks' process groups

    def remove_folder() -> None:
        if os.getpid() == server:
            shutil.rmtree(folder, ignore_errors=True)

    def restore_signals() -> None:
        if os.getppid() != server:  # a child's own children keep what the child has set
            return
        for signum in STEP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    atexit.register(remove_folder)
    for signum in STEP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    os.register_at_fork(after_in_child=restore_signals)


if FOLDER in os.environ:
    _prepare_server()
