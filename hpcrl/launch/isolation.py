"""What keeps code under test apart: no network, no sight of other processes, files read-only, where the kernel allows.

Linux namespaces that need no privileges (user namespaces). The standard library alone, as in family.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

CLONE_NEWNS, CLONE_NEWIPC = 1 << 17, 1 << 27
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 28, 1 << 29, 1 << 30
INSIDE_UID = 1000  # not 0, the namespace's root
MS_NOSUID, MS_NODEV, MS_PRIVATE = 2, 4, 1 << 18
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442  # on every architecture; Linux 5.12
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_NO_NEW_PRIVS = 38


def leave() -> None:
    """This process gets a user, network and IPC namespace of its own; its next child is the first of a new process
    namespace, whose end is the end of all in it. OSError where the kernel does not allow it."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    _check(_libc().unshare(flags), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_UID} {uid} 1"),
        ("gid_map", f"{INSIDE_UID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def freeze_files(folder: str, megabytes: int) -> None:
    """After `leave`: this process sees all files read-only but those of an empty, private `folder` of that size.

    OSError where the kernel cannot (before Linux 5.12); files are then as they were.
    """
    libc = _libc()
    _check(libc.unshare(CLONE_NEWNS), "unshare")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, MS_PRIVATE, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size), "mount_setattr")
    for place in (folder, "/dev/shm"):
        options = f"size={megabytes}m,mode=700".encode()
        _check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount on {place}")


def give_up_privileges() -> None:
    """Drops what `leave` gave: code that runs here from now on can neither take it back nor gain other rights."""
    libc = _libc()
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, nothing), "capset")


@functools.cache
def network_isolation() -> tuple[bool, str]:
    """Whether code under test runs without network here, and why not: asked of a process that tries."""
    import subprocess  # which programs under test should not have to wait for

    probe = subprocess.run(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if probe.returncode == 0:
        return True, ""
    return False, probe.stdout.strip() or f"the probe ended with {probe.returncode}"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _probe() -> int:
    if sys.platform != "linux":
        print("not Linux")
        return 1
    try:
        leave()
    except OSError as error:
        print(error.strerror or error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_probe())
