"""Run a Python program that a model wrote, with limits of time, memory, files and processes, and without network.

The limits hold everywhere. Isolation from the network, from other processes, from the user's files and keys, and from
memory that no limit counts needs a kernel that allows it; `hpcrl check` shows what this one allows.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

from hpcrl.sandbox import process_tree
from hpcrl.sandbox.isolation import probe_isolation, remove_folder

Fate = Literal["ok", "timeout", "memory", "killed", "error"]

SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program_supervisor.py")
SECONDS_TO_CLEAN_UP = 10.0


class Limits(NamedTuple):
    """Limits of one program and the processes it starts."""

    seconds: float = 10.0
    memory_mb: int = 1024  # address space of each process; memory of all together, what sockets can hold included
    file_mb: int = 16  # all its files together, or each file without a mount namespace
    stdout_kb: int = 1024  # standard output, and the same for standard error
    processes: int = 32


DEFAULT = Limits()


class Ran(NamedTuple):
    """How a program ended.

    fate: "ok" (exit code 0), "error" (an exception, or another exit code), "timeout", "memory" (MemoryError, or more
    than the limit in all processes together), "killed" (by a signal, or because of too many processes or threads or too
    much output). returncode is negative for a signal.
    """

    fate: Fate
    returncode: int
    stdout: str
    stderr: str


class SandboxUnavailable(RuntimeError):
    """The kernel does not isolate programs from the user's files, processes, keys and network, or a task's files cannot
    be used."""

    user_error = True


def run_python(source: str, stdin: str = "", limits: Limits = DEFAULT, *, best_effort: bool = False) -> Ran:
    """Run `source` as the main module of a Python program, in an empty folder that is removed afterwards.

    The program has no network and sees no other process (`isolation`), and no files but Python's, the system's programs
    and its own; some system calls fail (`seccomp`). Raises SandboxUnavailable if the kernel does not allow that, unless
    `best_effort` is true: then it can do what the user can, within `limits`. Raises RuntimeError in a process that uses
    MPI, because it starts processes.
    """
    check_no_mpi("run_python")
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    folder = os.path.join(tempfile.gettempdir(), f"hpcrl_sandbox_{os.urandom(8).hex()}")
    isolation = probe_isolation(*packages)
    if not isolation.complete and not best_effort:
        raise SandboxUnavailable(f"this kernel does not isolate programs: {isolation.why_not}")
    isolated = isolation.network, isolation.shown, isolation.filtered
    job = (source, stdin.encode("utf-8", "surrogatepass"), tuple(limits), folder, packages, isolated)
    supervisor = start_supervisor(SUPERVISOR)
    try:
        reply, _ = supervisor.communicate(marshal.dumps(job), limits.seconds + SECONDS_TO_CLEAN_UP)
        fate, returncode, stdout, stderr = marshal.loads(reply)
    except (subprocess.TimeoutExpired, EOFError, ValueError):
        remove_folder(folder)  # the supervisor does it, unless the program has killed the supervisor
        return Ran("killed", -9, "", "the supervisor of the sandbox was killed")
    finally:
        supervisor.send_signal(process_tree.END)  # no effect if it has ended, as it should have
        supervisor.communicate()
    return Ran(fate, returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))


def check_no_mpi(what: str) -> None:
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError(f"{what} was called in a process that uses MPI; call it from a worker process")


def start_supervisor(file: str) -> subprocess.Popen[bytes]:
    """Start a supervisor, with pipes for its input and output, and none of this process's environment."""
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # for the interpreter
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | environment,
        start_new_session=True,
    )
