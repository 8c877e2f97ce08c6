"""Isolation of untrusted code: namespaces, no network, no privileges, a filter of system calls, and the files it sees.

The namespaces need no privileges (user namespaces). The code sees Python's and the system's programs, read-only, and an
empty folder of its own; no home, no data, and no /tmp or /run of the machine, hence none of their sockets.
`probe_isolation` runs this file as a program to find out what the kernel allows. Linux only. Standard library only, as
in process_tree.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import seccomp
from hpcrl.sandbox.process_tree import libc_call

FOLDER = "/box"  # the working folder of the code
WRITABLE = (FOLDER, "/tmp", "/dev/shm")  # multiprocessing's locks are in /dev/shm
ROOT = "/tmp"  # where the new root is mounted at first; any folder would do
MAX_FILES = 16384

CLONE_NEWNS = 1 << 17
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
MNT_DETACH = 2
KEPT_FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}


def enter(shown: list[str], megabytes: int) -> None:
    """Let this process and its children see only `shown`, read-only, and empty folders in memory of `megabytes` in all.

    /proc shows only their own processes, if the kernel lets it be mounted. The working folder becomes one of the empty
    folders. Raises OSError, and changes nothing, if the kernel does not allow it.
    """
    libc_call("unshare", CLONE_NEWNS)
    libc_call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)
    sources = [os.open(place, os.O_PATH) for place in shown]  # before a mount covers `ROOT`
    options = f"size={megabytes}m,nr_inodes={MAX_FILES},mode=755".encode()
    libc_call("mount", b"tmpfs", ROOT.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    try:
        for folder in WRITABLE:
            os.makedirs(ROOT + folder)
        for place, source in zip(shown, sources, strict=True):
            bind_mount(f"/proc/self/fd/{source}", ROOT + place)
        for path, flags in mounts_in(ROOT):
            flags |= MS_REMOUNT | MS_BIND | MS_RDONLY
            libc_call("mount", None, os.fsencode(path), None, flags, None)
        mount_proc(f"{ROOT}/proc")
        os.chdir(ROOT)
        pivot_root()
    except OSError:
        os.chdir("/")
        libc_call("umount2", ROOT.encode(), MNT_DETACH)
        raise
    finally:
        for source in sources:
            os.close(source)
    os.chdir(FOLDER)


def bind_mount(source: str, target: str) -> None:
    """Bind-mount a file or folder, with the mounts in it, at `target`, which is created."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    libc_call("mount", os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None)


def mounts_in(root: str) -> list[tuple[str, int]]:
    """Path and flags of each mount below the one at `root`, recursively.

    Found by mount ids, because `root` may cover other mounts with the same paths.
    """
    file = os.open(root, os.O_PATH)
    with open(f"/proc/self/fdinfo/{file}") as info:
        (number,) = (line.split()[1] for line in info if line.startswith("mnt_id:"))
    os.close(file)
    below, found = {number}, []
    with open("/proc/self/mountinfo", errors="surrogateescape") as table:
        for line in table:  # parents come first
            number, parent, _, _, path, options, *_ = line.split(" ")
            if parent in below:
                below.add(number)
                for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                    path = path.replace(code, character)
                found.append((path, sum(KEPT_FLAGS.get(option, 0) for option in options.split(","))))
    return found


def mount_proc(folder: str) -> None:
    """Mount the /proc of this process namespace, if the kernel allows it; containers that hide parts of /proc do not.

    Read-only, because files in /proc/sys are writable for a user who is root outside.
    """
    os.mkdir(folder)
    for options in (b"subset=pid", None):  # subset=pid from Linux 5.8 on
        try:
            libc_call("mount", b"proc", folder.encode(), b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
            return
        except OSError:
            pass


def pivot_root() -> None:
    """Make the working folder the root of this process's files."""
    try:
        libc_call("pivot_root", b".", b".")  # puts the old root on top of the new one
    except OSError:
        os.chroot(".")  # on nodes that boot from memory; leaving a chroot needs privileges, which are given up
    else:
        libc_call("umount2", b".", MNT_DETACH)


def remove_folder(folder: str) -> None:
    """Remove a folder that untrusted code has written to, as far as possible, whatever its permissions."""
    import shutil  # programs under test should not have to wait for it

    for path, folders, _ in os.walk(folder):  # top-down: a folder is readable before it is entered
        for name in folders:
            inside = os.path.join(path, name)
            if not os.path.islink(inside):
                try:
                    os.chmod(inside, 0o700)
                except OSError:
                    pass
    shutil.rmtree(folder, ignore_errors=True)


CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 27, 1 << 28, 1 << 29, 1 << 30
INSIDE_UID = 1000  # not 0, the namespace's root
CAPABILITY_VERSION_3 = 0x20080522


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
    libc_call("prctl", seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc_call("capset", header, nothing)


NO_NETWORK, NO_FILES, FILTERED = "network", "files", "filter"  # lines that the probe prints
DIED = "the process that was to find out died"


class Isolation(NamedTuple):
    """What the kernel allows.

    network: untrusted code runs without network and in a process namespace of its own. shown: the only files it sees;
    empty if it sees all of the user's files. filtered: its system calls are filtered (`seccomp`). why_not: the reason
    for the first part that is missing.
    """

    network: bool
    shown: list[str]
    filtered: bool
    why_not: str = ""

    @property
    def complete(self) -> bool:
        return bool(self.shown) and self.filtered


@functools.cache
def probe_isolation(*packages: str) -> Isolation:
    """Find out what the kernel allows, with the folders `packages` among the visible files.

    Starts processes, so call it before MPI starts.
    """
    # programs under test import this module, and should not wait for these
    import subprocess

    from hpcrl.sandbox.visible_files import visible_paths

    shown = visible_paths(packages)
    command = [sys.executable, "-I", "-S", __file__, *shown]
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = probe.stdout.splitlines()
    reasons = [line for line in lines if line not in (NO_NETWORK, NO_FILES, FILTERED)]
    found = Isolation(NO_NETWORK in lines, shown if NO_FILES in lines else [], FILTERED in lines)
    return found if found.complete else found._replace(why_not=reasons[0] if reasons else DIED)


@functools.cache
def probe_in_child() -> Isolation:
    """As `probe_isolation`, for a process that uses MPI: a child of the fork server finds out."""
    from hpcrl.sandbox import fork_server

    pipe, far_end = fork_server.context().Pipe()
    child = fork_server.spawn(_send_isolation, (far_end,))
    far_end.close()
    try:
        found: Isolation = pipe.recv()
    except EOFError:
        found = Isolation(False, [], False, DIED)
    child.join()
    return found


def _send_isolation(pipe: Connection) -> None:
    pipe.send(probe_isolation())


def main(shown: list[str]) -> None:
    """Print a line for each part of the isolation that works, and why another does not."""
    for attempt in (lambda: isolate(shown), filter_calls):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            attempt()
        except (OSError, AttributeError) as error:  # the C libraries of other systems have no such function
            print(getattr(error, "strerror", None) or error)
        sys.stdout.flush()
        os._exit(0)


def isolate(shown: list[str]) -> None:
    unshare_namespaces()
    print(NO_NETWORK, flush=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        enter(shown, megabytes=1)
        give_up_privileges()
        print(NO_FILES)


def filter_calls() -> None:
    seccomp.install()
    print(FILTERED)


if __name__ == "__main__":
    main(sys.argv[1:])
