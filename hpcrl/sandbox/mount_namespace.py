"""The files that code under test sees: Python and the system's programs, read-only, and an empty folder of its own.

No home, no data, no /tmp or /run of the machine, hence no socket in them either. Linux, after `isolation.leave`. The
standard library alone, as in process_tree.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from hpcrl.sandbox.process_tree import call

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/zero", "/dev/urandom"),
)
FOLDER = "/box"  # where the code begins
WRITABLE = (FOLDER, "/tmp", "/dev/shm")  # /dev/shm is where multiprocessing's locks are
ROOT = "/tmp"  # where the root is mounted while it is made; any folder would do
MOST_FILES = 16384
LIBRARIES_OF = "bz2 ctypes hashlib lzma sqlite3 ssl zlib"

CLONE_NEWNS = 1 << 17
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
MNT_DETACH = 2
KEPT_FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}


def places(packages: Iterable[str]) -> list[str]:
    """What this interpreter needs with the folders `packages`: existing files and folders, none below another.

    OSError where Python's own folder is one that holds other things as well: a home, the temporary folder, all files.
    """
    prefixes = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    if wide := [prefix for prefix in prefixes if prefix not in SYSTEM and is_wide(prefix)]:
        raise OSError(0, f"Python's folder {wide[0]} holds other files too")
    others = [*packages, *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *library_folders()]
    wanted = [*SYSTEM, *prefixes, *(other for other in others if os.path.isabs(other) and not is_wide(other))]
    # By both names where there are links, as the others of its files lead to the one or the other.
    named = {name for place in wanted for name in (os.path.normpath(place), os.path.realpath(place))}
    found: list[str] = []
    for name in sorted(named, key=len):
        if os.path.exists(name) and not any(name.startswith(f"{above}/") for above in found):
            found.append(name)
    return found


def is_wide(folder: str) -> bool:
    """Whether the user's home or temporary folder is it or in it."""
    import tempfile  # which programs under test should not have to wait for, nor for subprocess

    inside = os.path.join(os.path.realpath(folder), "")
    kept = (os.path.expanduser("~"), tempfile.gettempdir(), "/tmp")
    return any(os.path.join(os.path.realpath(each), "").startswith(inside) for each in kept)


def library_folders() -> list[str]:
    """Where the libraries of Python's own modules are, which may be anywhere: asked of a process that loads them."""
    import subprocess

    look = (
        f"for name in {LIBRARIES_OF!r}.split():\n"
        "    try: __import__(name)\n"
        "    except ImportError: pass\n"
        "print(open('/proc/self/maps').read())"
    )
    command = [sys.executable, "-I", "-S", "-c", look]
    maps = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    files = {fields[5] for fields in (line.split(None, 5) for line in maps.splitlines()) if len(fields) == 6}
    return sorted({os.path.dirname(file) for file in files if file.startswith("/") and ".so" in file})


def enter(shown: list[str], megabytes: int) -> None:
    """From now on this process and its children see `shown`, read-only, their own processes in /proc where the kernel
    lets it be mounted, and empty folders in memory, of that size together; the working folder becomes one of them.

    OSError where the kernel cannot; files are then as they were.
    """
    call("unshare", CLONE_NEWNS)
    call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)
    sources = [os.open(place, os.O_PATH) for place in shown]  # before `ROOT` is covered, as it may hold some of them
    options = f"size={megabytes}m,nr_inodes={MOST_FILES},mode=755".encode()
    call("mount", b"tmpfs", ROOT.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    try:
        for folder in WRITABLE:
            os.makedirs(ROOT + folder)
        for place, source in zip(shown, sources, strict=True):
            bind(f"/proc/self/fd/{source}", ROOT + place)
        for path, flags in mounts_in(ROOT):
            flags |= MS_REMOUNT | MS_BIND | MS_RDONLY
            call("mount", None, os.fsencode(path), None, flags, None)
        mount_proc(f"{ROOT}/proc")
        os.chdir(ROOT)
        become_root()
    except OSError:
        os.chdir("/")
        call("umount2", ROOT.encode(), MNT_DETACH)
        raise
    finally:
        for source in sources:
            os.close(source)
    os.chdir(FOLDER)


def bind(source: str, target: str) -> None:
    """Shows a file or folder, with what is mounted in it, at `target` too, which is made."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    call("mount", os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None)


def mounts_in(root: str) -> list[tuple[str, int]]:
    """Path and flags of each mount below the one at `root`, those below them too.

    By their numbers: of the same paths there may be others, which `root` covers.
    """
    file = os.open(root, os.O_PATH)
    with open(f"/proc/self/fdinfo/{file}") as info:
        (number,) = (line.split()[1] for line in info if line.startswith("mnt_id:"))
    os.close(file)
    below, found = {number}, []
    with open("/proc/self/mountinfo", errors="surrogateescape") as table:
        for line in table:  # each after its parent
            number, parent, _, _, path, options, *_ = line.split(" ")
            if parent in below:
                below.add(number)
                for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                    path = path.replace(code, character)
                found.append((path, sum(KEPT_FLAGS.get(option, 0) for option in options.split(","))))
    return found


def mount_proc(folder: str) -> None:
    """Of this process namespace alone; nothing where the kernel refuses, as it does in containers that hide parts.

    Read-only: to a user who is root outside, files in /proc/sys belong.
    """
    os.mkdir(folder)
    for options in (b"subset=pid", None):  # the first from Linux 5.8
        try:
            call("mount", b"proc", folder.encode(), b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
            return
        except OSError:
            pass


def become_root() -> None:
    """The working folder becomes the root of this process's files."""
    try:
        call("pivot_root", b".", b".")  # puts the old root on top of the new one
    except OSError:
        os.chroot(".")  # on nodes that boot from memory; rights to come back from there are given up
    else:
        call("umount2", b".", MNT_DETACH)


def remove_folder(folder: str) -> None:
    """Remove a folder, also one whose owner may not look into it; what cannot be removed stays."""
    import shutil  # programs under test should not have to wait for it

    for path, folders, _ in os.walk(folder):  # each before it is looked into
        for name in folders:
            inside = os.path.join(path, name)
            if not os.path.islink(inside):
                try:
                    os.chmod(inside, 0o700)
                except OSError:
                    pass
    shutil.rmtree(folder, ignore_errors=True)
