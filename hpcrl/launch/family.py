"""A process with all that it has started, whatever session or parent those have got themselves since.

Linux only, the standard library alone: what supervises code under test imports this and must start in a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on this process, not init, is the parent of descendants whose own parent has gone; it must reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Get `signum` when the parent goes, whose process id the caller knows from before; at once if it has gone."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def be_the_first_to_go() -> None:
    """When memory runs out, the kernel ends this process and its descendants before it ends a rank."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # /proc is read-only in some containers


def children_of(pid: int) -> list[int]:
    """Process ids; none if the process has gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def descendants_of(pid: int, most: int | None = None) -> list[int]:
    """Children, their children and so on, nearest first; the search ends when it has found more than `most`."""
    found = children_of(pid)
    for member in found:
        if most is not None and len(found) > most:
            break
        found += children_of(member)
    return found


def kill_tree(pid: int) -> None:
    """Kills a process with its descendants. Each is stopped before its children are looked up: it has no more then."""
    stopped: dict[int, None] = {}
    found = [pid]
    while found:
        for member in found:
            _stop(member)
            stopped[member] = None
        # Again for all: a process may have been in the middle of starting one when it was stopped.
        found = [child for member in stopped for child in children_of(member) if child not in stopped]
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


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
