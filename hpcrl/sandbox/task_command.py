"""Commands of a task: they run in a process namespace and with the task's view of files as their root, within limits.

Two processes beside them: the watcher, which has the `Session` and kills what exceeds a limit, and the init of the
process namespace. When the init ends, the kernel kills all processes in the namespace. Linux only, standard library
only, as in process_tree.py.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hpcrl.sandbox import isolation, mounts, process_tree, seccomp
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.task_files import VIEW, memory_in_files
from hpcrl.sandbox.watched_child import (
    MAX_SIGNALS,
    MB,
    Child,
    OutputEnds,
    excess,
    limit_threads,
    sealed_file,
    set_limits,
    watch,
)

MAX_OPEN_FILES = 1024  # of each process
THREADS_PER_PROCESS = 4  # of the limit
STACK_MB = 8  # of each thread
IDLE_TICK_SECONDS = 0.2  # between two checks while no command runs
MOST_DROPPED = 64  # pipes
NOT_SET_UP = 126  # exit code
PYTHONS_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
PR_SET_DUMPABLE = 4


class Session:
    """A process namespace, in which this process, which has no other children, runs commands, one after the other.

    What a command leaves running stays until the session ends; what it still writes to its output is dropped. Limits
    are of all processes together: of memory and processes they end the session. That of time ends the command with its
    descendants and its process group, so orphans that called setsid stay.
    """

    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.is_over = False
        self._dropped: list[int] = []  # pipes of what is left running
        self._wake, _ = process_tree.wake_on_signals()
        libc_call("unshare", isolation.CLONE_NEWPID)
        self._init, self._init_output = self._fork(be_init)  # a pipe that is closed when it ends

    def run(self, act: Callable[[], None], seconds: float, output: int, stdin: bytes) -> tuple:
        """Run `act` inside, see `task_supervisor.Supervisor`."""
        ends = OutputEnds(output)
        pid, printed = self._fork(act, stdin)
        child = Child(pid, {pipe: OutputEnds(0) for pipe in self._dropped} | {printed: ends})
        why = watch(child, self._wake, seconds, self._most_processes, self._most_memory)
        if select.select([self._init_output], [], [], 0)[0]:
            if message := os.read(self._init_output, 4096):  # why it could not be set up
                self.end()
                return "", NOT_SET_UP, message, b"", 0
            why = why or "killed"
        if why == "timeout":
            process_tree.kill_tree(pid)
            os.waitpid(pid, 0)
        elif why:
            self.end()
        child.read(list(child.open))
        self._keep(child.open)
        code = -signal.SIGKILL if why else os.waitstatus_to_exitcode(child.status or 0)
        return why or "", code if why or code >= 0 else 128 - code, bytes(ends.head), bytes(ends.tail), ends.left_out

    @property
    def has_processes(self) -> bool:
        """Whether commands have left any running."""
        return not self.is_over and len(process_tree.descendants_of(os.getpid(), 1)) > 1

    def wait(self, requests: int) -> None:
        """Return when the pipe `requests` can be read, and end the session if its processes exceed a limit before.

        Dropped output is read once per tick, because a process that writes without end would keep this one busy.
        """
        leftover = Child(0, {pipe: OutputEnds(0) for pipe in self._dropped})
        ready: list[int] = []
        while requests not in ready:
            leftover.read(list(leftover.open))
            has_processes = self.has_processes
            if has_processes and excess(self._most_processes, self._most_memory):
                self.end()
            pause = IDLE_TICK_SECONDS if has_processes else None
            ready, _, _ = select.select([requests, self._wake], [], [], pause)
            if self._wake in ready:
                os.read(self._wake, 256)
            leftover.reap()
        self._keep(leftover.open)

    def end(self) -> None:
        """Kill all processes, and wait until they have ended."""
        if not self.is_over:
            self.is_over = True
            with suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait()

    def _keep(self, pipes: list[int]) -> None:
        """Keep the last ones, which are the newest, because a process that writes to a closed pipe ends."""
        for pipe in pipes[:-MOST_DROPPED]:
            os.close(pipe)
        self._dropped = pipes[-MOST_DROPPED:]

    @property
    def _most_processes(self) -> int:
        return self.limits["processes"] + 1  # init is one more

    def _most_memory(self) -> int:
        return self.limits["memory_mb"] * MB - memory_in_files() - process_tree.socket_bytes()

    def _fork(self, act: Callable[[], None], stdin: bytes = b"") -> tuple[int, int]:
        """Run `act` in a process of the namespace. Returns its process id, and a pipe with its output."""
        given = sealed_file(stdin)
        printed, print_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number, file in enumerate((given, print_writer, print_writer)):
                    os.dup2(file, number)
                os.closerange(3, 1 << 16)
                confine(self.limits)
            except BaseException as error:
                os.write(2, f"the sandbox cannot be set up: {error}\n".encode())
                os._exit(NOT_SET_UP)
            execute(act)
        for file in (given, print_writer):
            os.close(file)
        return pid, printed


def be_init() -> NoReturn:
    """Process 1 of the namespace: adopts processes whose parent has ended, which the kernel reaps."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def confine(limits: dict[str, int]) -> None:
    """Give up what a command must not have, in a process of the namespace."""
    libc_call("prctl", process_tree.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poll = select.poll()
    poll.register(1, 0)
    if poll.poll(0):  # the watcher, whose process id cannot be seen from here, has ended before
        os._exit(NOT_SET_UP)
    limit_threads(THREADS_PER_PROCESS * limits["processes"])
    if os.getpid() == 1:
        os.chroot(VIEW)  # mounts of its own would take as long as a short command
        os.chdir("/")
    else:
        mounts.unshare()
        mounts.mount_proc(VIEW)
        mounts.change_root(VIEW)
    # its memory is that of the supervisor, which it is a fork of
    libc_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    isolation.give_up_privileges()
    set_limits(
        (
            # not RLIMIT_AS: some languages' heaps reserve more than they use
            (resource.RLIMIT_DATA, limits["memory_mb"] * MB),
            (resource.RLIMIT_STACK, STACK_MB * MB),
            (resource.RLIMIT_FSIZE, limits["disk_mb"] * MB),
            (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
            (resource.RLIMIT_SIGPENDING, MAX_SIGNALS),
            (resource.RLIMIT_CORE, 0),
        )
    )
    os.umask(0o022)
    seccomp.install()


def execute(act: Callable[[], None]) -> NoReturn:
    """Run `act`, and exit; the exit code of an OSError is its number."""
    code = 1
    try:
        os.setsid()
        for signum in (*PYTHONS_SIGNALS, signal.SIGCHLD, process_tree.END, *process_tree.STOP_SIGNALS):
            signal.signal(signum, signal.SIG_DFL)
        act()
        code = 0
    except OSError as error:
        os.write(2, describe(error).encode(errors="backslashreplace"))
        code = error.errno or 1
    finally:
        os._exit(code)


def describe(error: OSError) -> str:
    if error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
