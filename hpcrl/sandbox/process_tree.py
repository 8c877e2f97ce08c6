"""A process with all that it has started, whatever session or parent those have got themselves since.

Linux only, the standard library alone: what supervises code under test imports this and must start in a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

# What batch systems send to every process of a job, whoever it is meant for. Ranks alone answer it.
STEP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
END = signal.SIGUSR2  # to a supervisor: end what is below you, and yourself
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LISTED = os.path.exists("/proc/thread-self/children")  # not by kernels without CONFIG_PROC_CHILDREN


def adopt_orphans() -> None:
    """From now on this process, not init, is the parent of descendants whose own parent has gone; it must reap them."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Get `signum` when the parent goes, whose process id the caller knows from before; at once if it has gone."""
    call("prctl", PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def raise_oom_score() -> None:
    """When memory runs out, the kernel ends this process and its descendants before it ends a rank."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # /proc is read-only in some containers


def children_of(pid: int) -> list[int]:
    """Process ids; none if the process has gone."""
    return _children_now()(pid)


def descendants_of(pid: int, most: int | None = None) -> list[int]:
    """Children, their children and so on, nearest first; the search ends when it has found more than `most`."""
    children = _children_now()
    found = children(pid)
    for member in found:
        if most is not None and len(found) > most:
            break
        found += children(member)
    return found


def use_more_than(size: int, pids: list[int]) -> bool:
    """Whether the resident memory of these processes is more than `size` bytes, what several share counted once."""
    return sum(map(_resident, pids)) > size and sum(map(_share, pids)) > size


def kill_tree(pid: int) -> None:
    """Kills a process with its descendants. Each is stopped before its children are looked up: it has no more then."""
    stopped: dict[int, None] = {}
    found = [pid]
    while found:
        for member in found:
            _stop(member)
            stopped[member] = None
        # Again for all: a process may have been in the middle of starting one when it was stopped.
        children = _children_now()
        found = [child for member in stopped for child in children(member) if child not in stopped]
    for member in stopped:
        _signal(member, signal.SIGKILL)


def kill_descendants() -> None:
    """Ends and reaps everything below this process, which must have called `adopt_orphans`."""
    while children := children_of(os.getpid()):
        for child in children:
            kill_tree(child)
        try:
            os.waitpid(children[0], 0)
        except ChildProcessError:
            pass
        reap()


def reap() -> None:
    """Takes leave of the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _stop(pid: int) -> None:
    """Stops a process with its whole group, unless that is this process's own: many that fork are stopped at once."""
    try:
        group = os.getpgid(pid)
        if group == os.getpgid(0):
            os.kill(pid, signal.SIGSTOP)
        else:
            os.killpg(group, signal.SIGSTOP)
    except ProcessLookupError:
        pass


def _signal(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def _children_now() -> Callable[[int], list[int]]:
    """Tells the children of a process id, as of now or of later."""
    if LISTED:
        return _listed
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]  # after the state; the name may hold anything
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(parent), []).append(int(name))
    return lambda pid: children.get(pid, [])


def _listed(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _resident(pid: int) -> int:
    """Bytes; 0 if the process has gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _share(pid: int) -> int:
    """Bytes, of shared pages this process's part; all it has resident where the kernel does not tell (Linux 4.14)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except OSError:
        return _resident(pid)


def call(function: str, *arguments: object) -> None:
    """A function of the C library that returns 0; OSError, which names it, where it does not."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
