"""A command of a task: it runs in a process namespace and with the task's view of files as its root, within limits.

Two processes beside it: the watcher, which kills it when it exceeds a limit, and the init of the process namespace.
When the init ends, the kernel kills all processes in the namespace. Linux only, standard library only, as in
process_tree.py.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hpcrl.sandbox import isolation, mounts, process_tree, seccomp
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.task_files import VIEW, memory_in_files
from hpcrl.sandbox.watched_child import MAX_SIGNALS, MB, Child, OutputEnds, sealed_file, set_limits, watch

MAX_OPEN_FILES = 1024  # of each process
THREADS_PER_PROCESS = 4  # of the limit
RESERVED_PIDS = 300  # those below are used once only
STACK_MB = 8  # of each thread
NOT_SET_UP = 126  # exit code
PYTHONS_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
PR_SET_DUMPABLE = 4


def watch_one(act: Callable[[], None], seconds: float, output: int, stdin: bytes, limits: dict[str, int]) -> tuple:
    """Run `act` in a process namespace of its own; see `task_supervisor.Supervisor`."""
    wake, _ = process_tree.wake_on_signals()
    libc_call("unshare", isolation.CLONE_NEWPID)
    given = sealed_file(stdin)
    printed, print_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for number, file in enumerate((given, print_writer, print_writer)):
                os.dup2(file, number)
            os.closerange(3, 1 << 16)
            become_init(limits)
        except BaseException as error:
            os.write(2, f"the sandbox cannot be set up: {error}\n".encode())
            os._exit(NOT_SET_UP)
        run_and_reap(act)
    for file in (given, print_writer):
        os.close(file)
    ends = OutputEnds(output)
    child = Child(pid, {printed: ends})

    def memory() -> int:
        return limits["memory_mb"] * MB - memory_in_files() - process_tree.socket_bytes()

    # init is one more process
    excess = watch(child, wake, seconds, limits["processes"] + 1, memory)
    if excess:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # until the kernel has killed all others
        child.read(list(child.open))
        code = -signal.SIGKILL
    else:
        code = os.waitstatus_to_exitcode(child.status or 0)
    return excess or ("killed" if code < 0 else ""), code, bytes(ends.head), bytes(ends.tail), ends.left_out


def become_init(limits: dict[str, int]) -> None:
    """Give up what a command must not have; the command inherits the rest."""
    libc_call("prctl", process_tree.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poll = select.poll()
    poll.register(1, 0)
    if poll.poll(0):  # the watcher, whose process id cannot be seen from here, has ended before
        os._exit(NOT_SET_UP)
    limit_threads(THREADS_PER_PROCESS * limits["processes"])
    mounts.unshare()
    mounts.mount_proc(VIEW)
    mounts.change_root(VIEW)
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
    # /proc/1 would show the memory of the supervisor, which this process is a fork of
    libc_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_threads(most: int) -> None:
    """Have the kernel limit the threads of this process namespace, as far as it can: a fork bomb that has become large
    takes the watcher's time."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if version >= (6, 14):  # before, the first of these is not the namespace's, but the machine's
        for name, value in (("pid_max", RESERVED_PIDS + most), ("ns_last_pid", RESERVED_PIDS)):
            with suppress(OSError), open(f"/proc/sys/kernel/{name}", "w") as file:
                file.write(str(value))
    if version >= (5, 14):  # before, threads of the user outside count too; without effect for root
        set_limits([(resource.RLIMIT_NPROC, most)])


def run_and_reap(act: Callable[[], None]) -> NoReturn:
    """Run `act` in a child, reap all processes that end, and exit with the child's code, 128 + n for a signal n."""
    main = os.fork()
    if main == 0:
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
    while True:
        pid, status = os.wait()
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def describe(error: OSError) -> str:
    if error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
