"""Child processes of a rank, forked by multiprocessing's fork server, which is started before MPI.

MPI and CUDA do not survive a fork, and a child that inherits a launcher's variables would be taken for a rank.

The server preloads this module. Batch systems send signals to every process of a job: the server ignores them; its
children start with the defaults and an empty mask, so that they can be terminated, and `worker.supervise` installs its
own handlers. A rank that was killed removes no files. Its temporary files are removed when the server ends, which is
when the rank and all of its children have ended.

The folder for temporary files of a rank and its children is multiprocessing's, which children inherit: `pymp-<random>`
in the system's folder for temporary files, for its user only. Its file `processes` has a line for the rank and one for
the server. If the server was killed as well as the rank, the user's next start on this host removes the folder.

Imported in children: standard library only.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from hpcrl.sandbox.process_tree import STEP_SIGNALS, STOP_SIGNALS, boot_id, pid_namespace, process_runs, started_at

LAUNCHER_PREFIXES = ("PMI_", "PMI2_", "PMIX", "PALS_", "OMPI_", "PRTE", "SLURM_", "MPICH", "MPIR_", "MPI_", "HYDRA")
FOLDER = "HPCRL_CHILDREN_FOLDER"  # an environment variable of the server only
_umask: int | None = None  # of children; None: the server's


def without_launcher_variables(environ: dict[str, str]) -> dict[str, str]:
    """`environ` without the variables that launchers set for ranks."""
    return {name: value for name, value in environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


def start() -> list[str]:
    """Start the server that all children are forked from, and return the folders of killed jobs that were removed. Call
    it before MPI starts, so that the server has no MPI.

    In the main thread. Ctrl-C reaches all processes of a job, and only the rank handles it: the server and its children
    ignore SIGINT from their first moment on.
    """
    full = dict(os.environ)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # by default the server imports the program's main module
    context().set_forkserver_preload([__name__])
    os.environ[FOLDER], removed = make_temporary_folder()
    try:
        for name in full.keys() - without_launcher_variables(full).keys():
            del os.environ[name]
        forkserver.ensure_running()
    finally:
        del os.environ[FOLDER]
        os.environ.update(full)
        signal.signal(signal.SIGINT, handler)
    return removed


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


def call(function: Callable[[], Any]) -> Any:
    """Result of a function of an importable module, which runs in a child; None if the child dies."""
    pipe, far_end = context().Pipe()
    child = spawn(_send_result, (function, far_end))
    far_end.close()
    try:
        return pipe.recv()
    except EOFError:
        return None
    finally:
        child.join()


def _send_result(function: Callable[[], Any], pipe: Connection) -> None:
    pipe.send(function())


def _run(umask: int | None, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if umask is not None:
        os.umask(umask)
    target(*args)


def _prepare_server() -> None:
    """Make this process, which is the server, ignore signals and remove files."""
    folder, server = os.environ.pop(FOLDER), os.getpid()
    keep_temporary_folder(folder)
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


PROCESSES_FILE = "processes"  # in the folder
SECONDS_TO_START = 3600.0  # from the start of mpiexec to the end of its ranks' MPI_Init, at most
CLOCK_ERROR = 60.0  # seconds by which the clock may have been corrected since a process began


def make_temporary_folder() -> tuple[str, list[str]]:
    """Make this rank's folder, and remove those whose processes have ended. Returns its path, and theirs."""
    folder = util.get_temp_dir()
    keep_temporary_folder(folder)
    removed = remove_leftovers(os.path.dirname(folder))
    remove_leftovers_of_mpiexec()
    return folder, removed


def set_compiler_cache() -> None:
    """Set the folder in which torch.compile looks for code to run: torch's own choice, which other users can guess and
    make first, unless it is not only this user's. Then it is in this rank's folder, and nothing is reused."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    import getpass  # here, because child processes import this module

    folder = os.path.join(util.get_temp_dir(), "compiled")
    with suppress(OSError, KeyError):  # a user without a name
        usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        with suppress(FileExistsError):
            os.mkdir(usual, 0o700)
        status = os.lstat(usual)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            folder = usual
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def keep_temporary_folder(folder: str) -> None:
    """Keep the folder as long as this process runs."""
    with suppress(OSError), open(os.path.join(folder, PROCESSES_FILE), "a") as file:
        file.write(f"{boot_id()} {pid_namespace()} {os.getpid()} {started_at(os.getpid())}\n")


def remove_leftovers(parent: str) -> list[str]:
    """Remove folders in `parent` that were this user's and that no process uses any more, and return their paths."""
    removed: list[str] = []
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith("pymp-"):
                with suppress(OSError, ValueError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_left(entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)  # follows no link
                        removed += [entry.path] * (not os.path.lexists(entry.path))
    return removed


def remove_leftovers_of_mpiexec(parent: str = "/tmp") -> None:
    """Remove the descriptions of the node that MPICH's mpiexec, which ignores TMPDIR, has left when it was killed.

    A proxy of mpiexec writes one after it has started, and its ranks read it in MPI_Init. So it is left over if it is
    old (proxies in other containers cannot be seen), and no proxy of the user began before it.
    """
    with suppress(OSError), os.scandir(parent) as entries:
        files = [(e.path, e.stat(follow_symlinks=False)) for e in entries if e.name.startswith("hydra_hwloc_xmlfile_")]
        latest = time.time() - SECONDS_TO_START
        old_files = [(path, of.st_mtime) for path, of in files if of.st_uid == os.geteuid() and of.st_mtime < latest]
        began = min(map(_began, _proxies()), default=latest) if old_files else latest
        for path, written in old_files:
            if written < began - CLOCK_ERROR:
                with suppress(OSError):
                    os.unlink(path)


def _proxies() -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/comm") as file:
            if file.read() == "hydra_pmi_proxy\n":
                yield int(name)


def _began(pid: int) -> float:
    """Seconds since 1970; now, for a process that has ended."""
    ticks = started_at(pid)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (now - ticks / os.sysconf("SC_CLK_TCK") if ticks not in (None, -1) else 0.0)


def _is_left(folder: str) -> bool:
    """Whether all processes of a folder have ended, as far as this process can see them."""
    with open(os.path.join(folder, PROCESSES_FILE)) as file:
        lines = [line.split() for line in file]
    return bool(lines) and all(
        (boot, namespace) == (boot_id(), pid_namespace()) and process_runs(int(pid), int(started)) is False
        for boot, namespace, pid, started in lines
    )


if FOLDER in os.environ:
    _prepare_server()
