"""Running a program that a model wrote: limited time, memory, files and processes, no network, nothing left behind.

Time, memory and processes are limited everywhere. No network, no sight of other processes and no sight of the user's
files need a kernel that allows them; what this one does `hpcrl check` says.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

from hpcrl.sandbox import process_tree
from hpcrl.sandbox.isolation import probe_isolation
from hpcrl.sandbox.mount_namespace import remove_folder

Fate = Literal["ok", "timeout", "memory", "killed", "error"]

SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program_supervisor.py")
SECONDS_TO_CLEAN_UP = 10.0


class Limits(NamedTuple):
    """Of one program and all that it starts."""

    seconds: float = 10.0
    memory_mb: int = 1024  # address space of each process, and resident memory of all
    file_mb: int = 16  # of all its files, or where it sees the user's, of each
    stdout_kb: int = 1024  # of standard output, and the same of standard error
    processes: int = 32


DEFAULT = Limits()


class Ran(NamedTuple):
    """How a program ended.

    fate: "ok" (exit code 0), "error" (an exception, or another exit code), "timeout", "memory" (MemoryError, or
    all processes together), "killed" (by a signal; or for too many processes or too much output). returncode is
    negative for a signal.
    """

    fate: Fate
    returncode: int
    stdout: str
    stderr: str


def run_python(source: str, stdin: str = "", limits: Limits = DEFAULT) -> Ran:
    """Runs `source` as a Python program's main module, in an empty folder of its own that is removed afterwards.

    Where the kernel allows it, the program has no network and sees no other process (launch.isolation), nor files but
    Python's, the system's programs and its own (launch.small_root). Elsewhere it can do what the user can, within
    `limits`. Starts processes, so it is for scoring processes, never for a rank (RuntimeError).
    """
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError("run_python was called in a process that uses MPI; call it from a scoring process")
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    folder = os.path.join(tempfile.gettempdir(), f"hpcrl_sandbox_{os.urandom(8).hex()}")
    isolation = probe_isolation(*packages)
    job = (
        *(source, stdin.encode("utf-8", "surrogatepass"), tuple(limits), folder, packages),
        *(isolation.network, isolation.shown),
    )
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # the interpreter's own
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", SUPERVISOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | kept,
        start_new_session=True,
    )
    try:
        reply, _ = supervisor.communicate(marshal.dumps(job), limits.seconds + SECONDS_TO_CLEAN_UP)
        fate, returncode, stdout, stderr = marshal.loads(reply)
    except (subprocess.TimeoutExpired, EOFError, ValueError):
        remove_folder(folder)  # which the supervisor does, unless the code found and killed it
        return Ran("killed", -9, "", "the supervisor of the sandbox was lost")
    finally:
        supervisor.send_signal(process_tree.END)  # no effect on one that has ended, as it should have
        supervisor.communicate()
    return Ran(fate, returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))
