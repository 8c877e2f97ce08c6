"""What keeps code under test apart: no network, no hold of other processes, no rights, where the kernel allows.

Linux namespaces that need no privileges (user namespaces). These alone leave it the user's files, /proc, and sockets
that have a path (multiprocessing's fork server, docker, D-Bus): small_root.py takes those away.
The standard library alone, as in family.py.
"""

from __future__ import annotations

import ctypes
import os

from hpcrl.launch.libc import call

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
        pass  # read-only in some containers; such rights would reach no further than the small root


def give_up_privileges() -> None:
    """Drops what `leave` gave: code that runs here from now on can neither take it back nor gain other rights."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, nothing)
