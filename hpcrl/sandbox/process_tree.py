"""Processes: find, measure and kill a process and its descendants, and recognise one that may have ended.

Linux only, standard library only: the supervisors of untrusted code import this module and must start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from resource import struct_rusage

# Batch systems send these to every process of a job. Only ranks handle them.
STEP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
STOP_SIGNALS = (*STEP_SIGNALS, signal.SIGINT)  # and Ctrl-C, which some launchers send to every process as well
END = signal.SIGUSR2  # to a supervisor: kill the descendants and exit
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)
HAS_CHILDREN_FILE = os.path.exists("/proc/thread-self/children")  # False for kernels without CONFIG_PROC_CHILDREN


def wake_on_signals() -> tuple[int, int]:
    """Have a supervisor's signals write their numbers to a pipe, and do nothing else. Returns its (reader, writer)."""
    wake, writer = os.pipe()
    os.set_blocking(writer, False)
    # Handlers that do nothing, instead of SIG_IGN: programs that are started by exec get the defaults back.
    for signum in (signal.SIGCHLD, END, *STEP_SIGNALS):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return wake, writer


def adopt_orphans() -> None:
    """Make this process, not init, the parent of descendants whose own parent has ended. It must reap them."""
    libc_call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_on_parent_death(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends, or now if `parent` has ended already."""
    libc_call("prctl", PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def raise_oom_score() -> None:
    """Have the kernel kill this process and its descendants before a rank when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # /proc is read-only in some containers


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children; empty if the process has ended."""
    return _children_lookup()(pid)


def descendants_of(pid: int, most: int | None = None) -> list[int]:
    """Process ids of children, their children and so on, nearest first. The search stops after more than `most`."""
    children = _children_lookup()
    members = children(pid)
    for member in members:
        if most is not None and len(members) > most:
            break
        members += children(member)
    return members


def usage_of(pid: int) -> tuple[int, int]:
    """Number of threads of a process, and its bytes in RAM or swap, shared pages in full; zeros if it has ended."""
    fields = _status(pid)
    threads = int(fields.get("Threads", 0))
    if threads > 1 and "VmRSS" not in fields:  # the main thread has ended
        fields = next((status for status in map(_status, _threads(pid)) if "VmRSS" in status), fields)
    return threads, sum(int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("VmRSS", "VmSwap"))


def proportional_bytes(pid: int) -> int:
    """Bytes in RAM or swap, with this process's share of shared pages. Before Linux 4.14 shared pages in full."""
    for thread in (pid, *_threads(pid)):
        try:
            with open(f"/proc/{thread}/smaps_rollup") as file:
                return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Pss:", "SwapPss:")))
        except ProcessLookupError:
            continue  # the main thread has ended
        except OSError:
            break
    return usage_of(pid)[1]


def socket_bytes() -> int:
    """The most that the buffers of all Unix sockets of this process's network namespace can hold.

    Sockets that no process has open count too: those in messages, and connections that no process has accepted.
    """
    lines = [line.split(" ", 5) for line in _lines("/proc/self/net/unix")][1:]
    if not lines:
        return 0
    import socket  # most programs have none

    with socket.socket(socket.AF_UNIX) as one:
        buffer = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    # a stream may exceed its sender's buffer by a message; a receiver of datagrams has a queue of 10 from any senders
    return sum(12 * buffer if line[4:5] == ["0002"] else 2 * buffer for line in lines)


def num_locks(pids: list[int], most: int) -> int:
    """Number of locks of parts of files that these processes have. The count stops after `most`."""
    count, members = 0, set(map(str, pids))
    for line in _lines("/proc/locks"):
        count += line.split()[4] in members
        if count > most:
            break
    return count


def kill_tree(pid: int) -> None:
    """Kill a process, its descendants, and their process groups but for those that another process leads.

    Each is stopped before its children are listed, so that it cannot fork. A process survives if it has left both the
    tree, because its parent has ended, and these groups, by setsid or setpgid.
    """
    stopped: dict[int, None] = {}
    groups: set[int] = set()
    members = [pid]
    while members:
        for member in members:
            groups |= _stop(member)
            stopped[member] = None
        # for all of them again, because a process may have been forking when it was stopped
        children = _children_lookup()
        members = [child for member in stopped for child in children(member) if child not in stopped]
    others = {group for group in groups if group not in stopped and os.path.exists(f"/proc/{group}")}
    for target in (*(-group for group in groups - others), *stopped):
        _send(signal.SIGKILL, target)
    for group in others:
        _send(signal.SIGCONT, -group)


def kill_descendants() -> None:
    """Kill and reap all descendants of this process, which must have called `adopt_orphans`."""
    while children := children_of(os.getpid()):
        for child in children:
            kill_tree(child)
        try:
            os.waitpid(children[0], 0)
        except ChildProcessError:
            pass
        reap()


def reap() -> list[tuple[int, int, struct_rusage]]:
    """Reap the children that have ended; returns process id, status and usage of each."""
    ended = []
    try:
        while (child := os.wait4(-1, os.WNOHANG))[0]:
            ended.append(child)
    except ChildProcessError:
        pass
    return ended


def _stop(pid: int) -> set[int]:
    """Stop a process and, unless it is this process's own, its whole group, so that many forking ones stop at once.
    Returns the stopped group, if any."""
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        return set()
    if group in (0, 1, os.getpgid(0)):  # -0 would be this process's group, and -1 all processes
        _send(signal.SIGSTOP, pid)
        return set()
    _send(signal.SIGSTOP, -group)
    return {group}


def _send(signum: signal.Signals, target: int) -> None:
    """Send a signal to a process, or to the group -`target`, if it exists."""
    with suppress(ProcessLookupError):
        os.kill(target, signum)


def _children_lookup() -> Callable[[int], list[int]]:
    """A function from a process id to its children, as of now or of the time of the call."""
    if HAS_CHILDREN_FILE:
        return _read_children
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]  # after the name, which may contain anything
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(parent), []).append(int(name))
    return lambda pid: children.get(pid, [])


def _read_children(pid: int) -> list[int]:
    pids: list[int] = []
    for thread in _threads(pid):
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return pids


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _status(pid: int) -> dict[str, str]:
    """Lines of /proc/PID/status by name; empty if the process has ended."""
    return dict(line.split(":", 1) for line in _lines(f"/proc/{pid}/status"))


def _lines(path: str) -> Iterator[str]:
    """Lines of a file; none if it does not exist, or is that of a process that has ended."""
    try:
        with open(path, errors="replace") as file:
            yield from file
    except (FileNotFoundError, ProcessLookupError):
        pass


def libc_call(function: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError with its name unless it returns 0."""
    if getattr(LIBC, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def process_runs(pid: int, started: int) -> bool | None:
    """Whether a process of this host exists that began at this time; None if it is hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    began = started_at(pid)
    return None if began is None else began == started


def started_at(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; -1 if it has ended and is a zombie, None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before may hold anything
    return -1 if state in "ZX" else int(rest[18])


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
