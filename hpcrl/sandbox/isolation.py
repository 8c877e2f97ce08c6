"""What keeps code under test apart: no network, no hold of other processes, no rights, where the kernel allows.

Linux namespaces that need no privileges (user namespaces). These alone leave it the user's files, /proc, and sockets
that have a path (multiprocessing's fork server, docker, D-Bus): mount_namespace.py takes those away.
The standard library alone, as in process_tree.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import mount_namespace
from hpcrl.sandbox.process_tree import call

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 27, 1 << 28, 1 << 29, 1 << 30
INSIDE_UID = 1000  # not 0, the namespace's root
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_NO_NEW_PRIVS = 38


def leave() -> None:
    """This process gets a user, network and IPC namespace of its own; its next child is the first of a new process
    namespace, whose end is the end of all in it. OSError where the kernel does not allow it."""
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
    for name, text in (
        ("self/setgroups", "deny"),
        ("self/uid_map", f"{INSIDE_UID} {uid} 1"),
        ("self/gid_map", f"{INSIDE_UID} {gid} 1"),
    ):
        with open(f"/proc/{name}", "w") as file:
            file.write(text)
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # this one's, so that the code cannot make others, where it would have rights again
    except OSError:
        pass  # read-only in some containers; such rights would reach no further than the mount namespace


def give_up_privileges() -> None:
    """Drops what `leave` gave: code that runs here from now on can neither take it back nor gain other rights."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, nothing)


NO_NETWORK, NO_FILES = "network", "files"  # what the probe says of a part that holds


class Isolation(NamedTuple):
    """Whether code under test runs without network and in a process namespace; and then, the only files that are shown
    to it: none where it sees all of the user's."""

    network: bool
    shown: list[str]
    why_not: str = ""


@functools.cache
def probe_isolation(*packages: str) -> Isolation:
    """With the folders `packages` among the files. Starts processes, so it is for before MPI."""
    import subprocess  # programs under test import this module, and should not wait for it

    shown: list[str] = []
    why_not = ""
    try:
        shown = mount_namespace.places(packages)
    except OSError as error:
        why_not = error.strerror or str(error)
    command = [sys.executable, "-I", "-S", __file__, *shown]
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = probe.stdout.split("\n")
    if NO_FILES in said:
        return Isolation(True, shown)
    return Isolation(NO_NETWORK in said, [], said[-1] or why_not or f"the probe ended with {probe.returncode}")


def main(shown: list[str]) -> None:
    """One line for each part that holds; then, on a line of its own, why the next one does not."""
    try:
        leave()
        print(NO_NETWORK, flush=True)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif shown:
            mount_namespace.enter(shown, megabytes=1)
            give_up_privileges()
            print(NO_FILES)
    except (OSError, AttributeError) as error:  # a C library that is not Linux's has no such function
        print(getattr(error, "strerror", None) or error, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
