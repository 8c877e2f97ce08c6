"""Mounts in a mount namespace of this process's own, which needs no privileges in a user namespace, and paths in a
folder that untrusted code, or an untrusted archive, has written to.

Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpcrl.sandbox.process_tree import libc_call

CLONE_NEWNS = 1 << 17
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
MNT_DETACH = 2
KEPT_FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}


def unshare() -> None:
    """Give this process a mount namespace of its own, whose mounts no other one has, and which end with it."""
    libc_call("unshare", CLONE_NEWNS)
    libc_call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)


def mount_memory(folder: str, megabytes: int, files: int) -> None:
    """Mount an empty tmpfs of this size, and with at most so many files."""
    options = f"size={megabytes}m,nr_inodes={files},mode=755".encode()
    libc_call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def allow_files(folder: str, files: int) -> None:
    """Change the number of files that the tmpfs at `folder` may have."""
    libc_call("mount", None, folder.encode(), None, MS_REMOUNT | MS_NOSUID | MS_NODEV, f"nr_inodes={files}".encode())


def detach(folder: str) -> None:
    """Unmount what is mounted at a folder, and in it, for this namespace."""
    libc_call("umount2", folder.encode(), MNT_DETACH)


def show(sources: dict[str, int], root: str) -> None:
    """Bind-mount files and folders, with the mounts in them, below `root`, and make all mounts there read-only.

    Args:
        sources: for each path below `root`, a file descriptor of what it is to show.
    """
    for place, source in sources.items():
        bind_mount(f"/proc/self/fd/{source}", root, place)
    for path, flags in mounts_in(root):
        libc_call("mount", None, os.fsencode(path), None, flags | MS_REMOUNT | MS_BIND | MS_RDONLY, None)


def bind_mount(source: str, root: str, place: str) -> None:
    """Bind-mount a file or folder, with the mounts in it, at the path `place` below `root`, which is created."""
    with created_below(root, place, is_folder=os.path.isdir(source)) as target:
        libc_call("mount", os.fsencode(source), target.encode(), None, MS_BIND | MS_REC, None)


def mounts_in(root: str) -> list[tuple[str, int]]:
    """Path and flags of each mount below the one at `root`, recursively.

    Found by mount ids, because `root` may cover other mounts with the same paths.
    """
    file = os.open(root, os.O_PATH)
    with open(f"/proc/self/fdinfo/{file}") as info:
        (number,) = (line.split()[1] for line in info if line.startswith("mnt_id:"))
    os.close(file)
    below, mounts = {number}, []
    with open("/proc/self/mountinfo", errors="surrogateescape") as table:
        for line in table:  # parents come first
            number, parent, _, _, path, options, *_ = line.split(" ")
            if parent in below:
                below.add(number)
                for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                    path = path.replace(code, character)
                mounts.append((path, sum(KEPT_FLAGS.get(option, 0) for option in options.split(","))))
    return mounts


def mount_proc(root: str) -> None:
    """Mount the /proc of this process namespace below `root`, if the kernel allows it; containers that hide parts of
    /proc do not.

    Read-only, because files in /proc/sys are writable for a user who is root outside.
    """
    with created_below(root, "/proc") as target:
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        for options in (b"subset=pid", None):  # subset=pid from Linux 5.8 on
            with suppress(OSError):
                libc_call("mount", b"proc", target.encode(), b"proc", flags, options)
                return


def change_root(folder: str) -> None:
    """Make the folder, where something is mounted, the root of this process's files, and its working folder."""
    os.chdir(folder)
    try:
        libc_call("pivot_root", b".", b".")  # puts the old root on top of the new one
    except OSError:
        os.chroot(".")  # on nodes that boot from memory; leaving a chroot needs privileges, which are given up
    else:
        detach(".")


@contextmanager
def created_below(root: str, place: str, *, is_folder: bool = True) -> Iterator[str]:
    """Context with a name, which no link can change, of the file or folder `place` below `root`, which is created.

    No link below `root` is followed. Raises OSError (ENOTDIR) if there is one in the place of a folder.
    """
    parts = [part for part in place.split("/") if part]
    file = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        for part in parts if is_folder else parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=file)
            file = _enter(file, part, os.O_DIRECTORY)
        if not is_folder:
            with suppress(FileExistsError):
                os.close(os.open(parts[-1], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=file))
            file = _enter(file, parts[-1])
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _enter(folder: int, name: str, flags: int = 0) -> int:
    """Open what is in a folder, without following a link, and close the folder."""
    inside = os.open(name, os.O_PATH | os.O_NOFOLLOW | flags, dir_fd=folder)
    os.close(folder)
    return inside
