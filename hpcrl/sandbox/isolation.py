"""Isolation of untrusted code: no network, no access to other processes, no privileges, if the kernel allows it.

Uses Linux namespaces that need no privileges (user namespaces). They do not hide the user's files, /proc, and sockets
that have a path (multiprocessing's fork server, docker, D-Bus); mount_namespace.py does. `probe_isolation` runs this
file as a program to find out what the kernel allows. Standard library only, as in process_tree.py.
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
from hpcrl.sandbox.process_tree import libc_call

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 27, 1 << 28, 1 << 29, 1 << 30
INSIDE_UID = 1000  # not 0, the namespace's root
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_NO_NEW_PRIVS = 38


def unshare_namespaces() -> None:
    """Move this process to new user, network and IPC namespaces, and its next child to a new process namespace.

    When that child ends, the kernel kills all processes of its namespace. Raises OSError if the kernel does not allow
    it.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc_call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
    for name, text in (
        ("self/setgroups", "deny"),
        ("self/uid_map", f"{INSIDE_UID} {uid} 1"),
        ("self/gid_map", f"{INSIDE_UID} {gid} 1"),
    ):
        with open(f"/proc/{name}", "w") as file:
            file.write(text)
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # in a nested user namespace the code would have privileges again
    except OSError:
        pass  # read-only in some containers; such privileges end at the mount namespace


def give_up_privileges() -> None:
    """Drop the privileges that `unshare_namespaces` gave, for good: the process cannot gain any again."""
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc_call("capset", header, nothing)


NO_NETWORK, NO_FILES = "network", "files"  # lines that the probe prints


class Isolation(NamedTuple):
    """What the kernel allows.

    network: untrusted code runs without network and in a process namespace of its own. shown: the only files it sees;
    empty if it sees all of the user's files. why_not: why the next part is missing.
    """

    network: bool
    shown: list[str]
    why_not: str = ""


@functools.cache
def probe_isolation(*packages: str) -> Isolation:
    """Find out what the kernel allows, with the folders `packages` among the visible files.

    Starts processes, so call it before MPI starts.
    """
    import subprocess  # programs under test import this module, and should not wait for it

    shown: list[str] = []
    why_not = ""
    try:
        shown = mount_namespace.visible_paths(packages)
    except OSError as error:
        why_not = error.strerror or str(error)
    command = [sys.executable, "-I", "-S", __file__, *shown]
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = probe.stdout.split("\n")
    if NO_FILES in lines:
        return Isolation(True, shown)
    return Isolation(NO_NETWORK in lines, [], lines[-1] or why_not or f"the probe ended with {probe.returncode}")


def main(shown: list[str]) -> None:
    """Print a line for each part of the isolation that works, then why the next one does not."""
    try:
        unshare_namespaces()
        print(NO_NETWORK, flush=True)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif shown:
            mount_namespace.enter(shown, megabytes=1)
            give_up_privileges()
            print(NO_FILES)
    except (OSError, AttributeError) as error:  # the C libraries of other systems have no such function
        print(getattr(error, "strerror", None) or error, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
