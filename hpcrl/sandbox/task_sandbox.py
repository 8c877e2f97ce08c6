"""A sandbox for one task: commands of a model run on the task's files, and keep what they write from turn to turn.

It needs neither root nor a daemon: namespaces of an unprivileged user, as for programs under test (`isolation`), and a
copy-on-write view of the task's folder or of an image with a root of its own. `task_supervisor` is the process that has
them; when it ends, or this process, nothing is left of the sandbox. Linux only. Standard library only.
"""

from __future__ import annotations

import errno
import functools
import marshal
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from hpcrl.sandbox import fork_server
from hpcrl.sandbox.isolation import DIED, visible_paths
from hpcrl.sandbox.program import SandboxUnavailable, check_no_mpi, start_supervisor
from hpcrl.sandbox.task_files import WORKSPACE
from hpcrl.sandbox.task_supervisor import HOME

Fate = Literal["ok", "error", "timeout", "memory", "processes", "killed"]

SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "task_supervisor.py")
SECONDS_TO_START = 60.0  # the folder may have to be copied
SECONDS_TO_CLEAN_UP = 30.0
MOST_READ = 2**24  # bytes of a file, which this process has several times
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED = (
    "allow user namespaces with mounts (user.max_user_namespaces, user.max_mnt_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns, or the container's seccomp profile), and seccomp filters (x86_64 or "
    "aarch64)"
)


class Limits(NamedTuple):
    """Limits of a sandbox; those of memory, threads and processes are for all its processes together."""

    memory_mb: int = 2048  # of processes, what sockets can hold, and files
    disk_mb: int = 1024  # of files that are new or changed, snapshots included; they are in memory
    files: int = 65536  # number of such files
    processes: int = 48  # with what earlier commands have left running; and four times as many threads
    output_kb: int = 64  # of a command's output, half from its beginning and half from its end


DEFAULT = Limits()


class Ran(NamedTuple):
    """How a command ended.

    fate: "ok" (exit code 0), "error" (another one), "timeout", "memory", "processes" (more than the limit; or threads),
    "killed" (a process of the sandbox was killed from outside). returncode: 128 + n after a signal n, -9 if a limit
    ended it. output: standard output and error as they were written; left_out: bytes missing in its middle, where a
    line says so.
    """

    fate: Fate
    returncode: int
    output: str
    left_out: int = 0


class SandboxLost(RuntimeError):
    """The supervisor of a sandbox was killed, or does not answer; its files are lost."""


class TaskSandbox:
    """The files of a task, and commands that run on them. A context manager; not for several threads at once.

    All changes are in memory and end with the sandbox. A command sees no other files, has no network, sees no other
    processes, and cannot gain privileges; some system calls fail (`seccomp`). Processes that it leaves running stay for
    the next commands, until `end_processes`, a snapshot, a restore, or the end; the limits count them too.

    Raises SandboxUnavailable if the kernel does not allow it, or the files cannot be used; ValueError for limits that
    exclude each other; RuntimeError in a process that uses MPI, because it starts a process.

    Args:
        folder: what is in /workspace at first; nothing of it is changed.
        image: a root file system: a folder that the user owns, or a squashfs file (with squashfuse) whose files have
            the user and group 1000; None: the system's programs, read-only, and the Python of this process.
        limits: see `Limits`.
        packages: folders such as site-packages that the Python of this process is to see; without an image.
        layers: False to copy the folder even where the kernel could copy what changes only.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        image: Path | str | None = None,
        limits: Limits = DEFAULT,
        packages: Sequence[str] = (),
        *,
        layers: bool = True,
    ) -> None:
        check_no_mpi("TaskSandbox")
        if limits.disk_mb >= limits.memory_mb:
            raise ValueError(f"disk_mb={limits.disk_mb} must be less than memory_mb={limits.memory_mb}, which has both")
        squashfuse = ""
        if image is not None and os.path.isfile(image):
            squashfuse = shutil.which("squashfuse") or ""
            if not squashfuse:
                raise SandboxUnavailable(f"image {image}: squashfuse is not installed; unpack the image (unsquashfs)")
        for name, given in (("folder", folder), ("image", None if squashfuse else image)):
            if given is not None and not os.path.isdir(given):
                raise SandboxUnavailable(f"{name} {given}: not a directory; unpack archives with `task_archive.unpack`")
        if folder is not None and image is None and os.stat(folder).st_uid != os.geteuid():
            layers = False  # a changed file of another user cannot have its owner inside, and a copy is this user's
        shown = [] if image is not None else list(_visible(tuple(packages)))
        self._path = PATH if image is not None else f"{os.path.dirname(sys.executable)}:{PATH}"
        self._snapshots: set[int] = set()
        self._supervisor = start_supervisor(SUPERVISOR)
        try:
            places = [os.path.abspath(given) if given is not None else "" for given in (folder, image)]
            job = (*places, squashfuse, shown, layers), limits._asdict()
            try:
                self.copied = self._exchange(job, SECONDS_TO_START) == "Copies"
            except SandboxUnavailable as error:
                raise SandboxUnavailable(f"image {image}: {error}" if image else str(error)) from None
            excess, code, text, *_ = self._request("prepare", seconds=SECONDS_TO_START)
            if excess:
                raise SandboxLost(f"a process of the sandbox has ended at its start: {excess}")
            if code:
                raise SandboxUnavailable(f"the sandbox cannot be set up: {text.decode('utf-8', 'replace')}")
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: str | Sequence[str],
        timeout: float = 60.0,
        stdin: bytes = b"",
        environment: Mapping[str, object] | None = None,
        folder: str = WORKSPACE,
    ) -> Ran:
        """Run a command line of bash, or a program with its arguments, for at most `timeout` seconds.

        Returns when it ends, whatever it leaves running, whose further output is dropped. A command that takes too long
        is killed with what it has started, except orphans that called setsid; if memory or processes exceed a limit,
        what was left running is killed too.

        Raises SandboxLost.

        Args:
            environment: variables beside PATH, HOME, USER, LANG, TERM, TMPDIR and OMP_NUM_THREADS.
            folder: its working folder.
        """
        given = ["bash", "-lc", command] if isinstance(command, str) else list(map(str, command))
        variables = {"PATH": self._path, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
        variables |= {"TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
        variables |= {name: str(value) for name, value in (environment or {}).items()}
        reply = self._request("run", given, folder, variables, stdin, timeout, seconds=timeout)
        excess, code, head, tail, left_out = reply
        output = head + (f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b"") + tail
        return Ran(excess or ("error" if code else "ok"), code, output.decode("utf-8", "replace"), left_out)

    def end_processes(self) -> None:
        """Kill what commands have left running."""
        self._request("end_processes")

    def read(self, path: str, most: int = MOST_READ) -> bytes:
        """Read a regular file of at most `most` bytes. Links are followed inside the sandbox. Raises OSError."""
        excess, code, data, *_ = self._request("read", _inside(path), most)
        self._check(path, excess, code)
        return bytes(data)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file in the place of what has this name, a link too; folders that are missing are made. Raises
        OSError."""
        excess, code, *_ = self._request("write", _inside(path), data, mode)
        self._check(path, excess, code)

    def snapshot(self) -> int:
        """Keep the files as they are now, and return the snapshot's number.

        It takes neither time nor room, but those of a copy of all files where the kernel has no layers (`copied`).
        Raises OSError if there is no room, or after 200 in one history.
        """
        number: int = self._request("snapshot")
        self._snapshots.add(number)
        return number

    def restore(self, snapshot: int) -> None:
        """Return to the files of a snapshot. All snapshots stay. Raises ValueError for a number that is none."""
        self._check_snapshot(snapshot)
        self._request("restore", snapshot)

    def drop(self, snapshot: int) -> None:
        """Forget a snapshot, which frees what only it holds. Raises ValueError for a number that is none."""
        self._check_snapshot(snapshot)
        self._snapshots.remove(snapshot)
        self._request("drop", snapshot)

    def close(self) -> None:
        """Kill all processes of the sandbox and drop its files. It may be called again."""
        supervisor = self._supervisor
        assert supervisor.stdin is not None and supervisor.stdout is not None
        try:
            supervisor.stdin.close()
        except BrokenPipeError:
            pass
        try:
            supervisor.wait(SECONDS_TO_CLEAN_UP)
        except subprocess.TimeoutExpired:
            supervisor.kill()  # the kernel kills the others with it
            supervisor.wait()
        supervisor.stdout.close()

    def __enter__(self) -> TaskSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, *request: Any, seconds: float = SECONDS_TO_CLEAN_UP) -> Any:
        try:
            return self._exchange(request, seconds + SECONDS_TO_CLEAN_UP)
        except SandboxUnavailable as error:
            raise OSError(str(error)) from None

    def _exchange(self, message: Any, seconds: float) -> Any:
        """Send a message and return the reply. Raises SandboxUnavailable with the reason if that is what it says."""
        supervisor = self._supervisor
        assert supervisor.stdin is not None and supervisor.stdout is not None
        text = marshal.dumps(message)
        try:
            supervisor.stdin.write(text)
            supervisor.stdin.flush()
            answer = select.poll()
            answer.register(supervisor.stdout, select.POLLIN)
            if not answer.poll(seconds * 1000):
                raise SandboxLost(f"the supervisor of a sandbox has not answered for {seconds:.0f} s")
            what, reply = marshal.load(supervisor.stdout)
        except (EOFError, BrokenPipeError):
            raise SandboxLost("the supervisor of a sandbox was killed") from None
        except BaseException:
            supervisor.kill()  # the next reply could be the one to this message
            raise
        if what == "failed":
            raise SandboxUnavailable(reply)
        return reply

    def _check_snapshot(self, snapshot: int) -> None:
        if snapshot not in self._snapshots:
            raise ValueError(f"there is no snapshot {snapshot}; expected one of {sorted(self._snapshots)}")

    def _check(self, path: str, excess: str, code: int) -> None:
        if excess:
            raise OSError(errno.EIO, f"not done: {excess}", path)
        if code:
            raise OSError(code, os.strerror(code), path)


class Availability(NamedTuple):
    """Whether this machine can have such sandboxes: why_not is "" if so. layers: the kernel copies on write."""

    why_not: str
    layers: bool = False


@functools.cache
def probe_sandbox() -> Availability:
    """Find out by making a sandbox. Starts processes, so call it before MPI starts."""
    try:
        with TaskSandbox() as sandbox:
            ran = sandbox.run(["true"])
            return Availability("" if ran.fate == "ok" else f"`true` fails in it: {ran}", not sandbox.copied)
    except (SandboxUnavailable, SandboxLost) as error:
        return Availability(str(error))


def require(availability: Availability | None = None) -> None:
    """Raise SandboxUnavailable, an error of the user in one line, if this machine cannot have such sandboxes.

    For the start of a job that needs them.

    Args:
        availability: what `probe_sandbox` returned; None, in a process that uses MPI: a child of the fork server finds
            out.
    """
    availability = availability or fork_server.call(probe_sandbox) or Availability(DIED)
    if availability.why_not:
        raise SandboxUnavailable(
            f"this machine cannot run tasks in sandboxes ({availability.why_not}); {NEEDED} (`hpcrl check`)"
        )


@functools.cache
def _visible(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(visible_paths(packages))


def _inside(path: str) -> str:
    return os.path.join(WORKSPACE, path)
