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
from collections.abc import Iterable
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import mounts, seccomp
from hpcrl.sandbox.process_tree import libc_call

FOLDER = "/box"  # the working folder of the code
WRITABLE = (FOLDER, "/tmp", "/dev/shm")  # multiprocessing's locks are in /dev/shm
ROOT = "/tmp"  # where the new root is mounted at first; any folder would do
MAX_FILES = 16384


def enter(shown: list[str], megabytes: int) -> None:
    """Let this process and its children see only `shown`, read-only, and empty folders in memory of `megabytes` in all.

    /proc shows only their own processes, if the kernel lets it be mounted. The working folder becomes one of the empty
    folders. Raises OSError, and changes nothing, if the kernel does not allow it.
    """
    mounts.unshare()
    sources = [os.open(place, os.O_PATH) for place in shown]  # before a mount covers `ROOT`
    mounts.mount_memory(ROOT, megabytes, MAX_FILES)
    try:
        for folder in WRITABLE:
            os.makedirs(ROOT + folder)
        mounts.show(dict(zip(shown, sources, strict=True)), ROOT)
        mounts.mount_proc(ROOT)
        mounts.change_root(ROOT)
    except OSError:
        os.chdir("/")
        mounts.detach(ROOT)
        raise
    finally:
        for source in sources:
            os.close(source)
    os.chdir(FOLDER)


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


CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (1 << bit for bit in range(26, 31))
INSIDE_UID = 1000  # not 0, the namespace's root
CAP_SYS_ADMIN, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 21, 47, 2
CAPABILITY_VERSION_3 = 0x20080522


def unshare_namespaces(others: int = CLONE_NEWPID) -> None:
    """Move this process to new user, network and IPC namespaces, and to `others`; its next child to a new process
    namespace if that is among them.

    When that child ends, the kernel kills all processes of its namespace. Raises OSError if the kernel does not allow
    it.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc_call("unshare", CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | others)
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
    _set_capabilities(0, 0)


def keep_only_mounting() -> None:
    """Drop the privileges that `unshare_namespaces` gave but that to mount, which a program that is executed keeps."""
    _set_capabilities(1 << CAP_SYS_ADMIN, 1 << CAP_SYS_ADMIN)
    libc_call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN, 0, 0)


def _set_capabilities(own: int, inheritable: int) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    libc_call("capset", header, (ctypes.c_uint32 * 6)(own, own, inheritable, 0, 0, 0))


# Programs under test import this module, and should not wait for `re` and `subprocess`.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/urandom"),  # not /dev/zero: mapped, it is memory that no process shows
)
MODULES = "bz2 ctypes hashlib lzma sqlite3 ssl zlib numpy"  # which load shared libraries
LIBRARY = r".*\.(so(\.[\w.]+)?|a|la|o)"


def visible_paths(packages: Iterable[str]) -> list[str]:
    """Files and folders that this interpreter needs to run with the folders `packages`, none of them below another.

    A virtual environment, or a folder in LD_LIBRARY_PATH, may be the folder of the user's project. So neither is shown
    as a whole, but only the parts that Python reads.
    """
    packages = list(packages)
    paths = outermost([*SYSTEM, *interpreter_paths(), *packages])
    return outermost([*paths, *library_paths(loaded_libraries(packages), paths)])


def outermost(places: Iterable[str]) -> list[str]:
    """Those that exist and are not below another, by both names if there are links: files may refer to either."""
    full = filter(os.path.isabs, places)
    named = {name for place in full for name in (os.path.normpath(place), os.path.realpath(place))}
    paths: list[str] = []
    for name in sorted(named, key=len):
        if os.path.exists(name) and not is_below(name, paths):
            paths.append(name)
    return paths


def is_below(name: str, folders: list[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


def interpreter_paths() -> list[str]:
    """The interpreter, its standard library, and what says that it is in a virtual environment."""
    modules = [os.path.dirname(os.__file__), *(path for path in sys.path if path.endswith("/lib-dynload"))]
    # conda has the libraries of its packages in one folder, which they load when they need them
    libraries = [f"{prefix}/lib" for prefix in (sys.base_prefix, sys.prefix) if os.path.isdir(f"{prefix}/conda-meta")]
    return [sys.executable, f"{sys.prefix}/pyvenv.cfg", *modules, *libraries]


def loaded_libraries(packages: list[str]) -> list[str]:
    """Shared libraries of a Python process that has loaded `MODULES`, as its memory map names them."""
    import subprocess

    look = (
        f"import sys; sys.path += {packages!r}\n"
        f"for name in {MODULES!r}.split():\n"
        "    try: __import__(name)\n"
        "    except Exception: pass\n"
        "    print(open('/proc/self/maps').read(), flush=True)\n"  # the next module may end the process
    )
    command = [sys.executable, "-I", "-S", "-c", look]
    maps = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    files = {fields[5] for fields in (line.split(None, 5) for line in maps.splitlines()) if len(fields) == 6}
    return sorted(file for file in files if file.startswith("/") and ".so" in file)


def library_paths(files: list[str], shown: list[str]) -> list[str]:
    """The libraries among `files` that are not below `shown`, by all names by which the loader may look for them.

    A folder that has nothing but libraries stands for its libraries.
    """
    import re

    searched = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), f"{sys.base_prefix}/lib"]
    paths: list[str] = []
    for file in files:
        if is_below(file, shown):
            continue
        for folder in filter(os.path.isdir, {os.path.dirname(file), *filter(os.path.isabs, searched)}):
            with os.scandir(folder) as entries:
                libraries = {entry.name for entry in entries if entry.is_file() and re.fullmatch(LIBRARY, entry.name)}
            names = [name for name in libraries if os.path.samefile(f"{folder}/{name}", file)]
            if names and len(libraries) == len(os.listdir(folder)):
                paths.append(folder)
            else:
                paths += [f"{folder}/{name}" for name in names]
    return paths


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
    import subprocess

    shown = visible_paths(packages)
    command = [sys.executable, "-I", "-S", __file__, *shown]
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = probe.stdout.splitlines()
    reasons = [line for line in lines if line not in (NO_NETWORK, NO_FILES, FILTERED)]
    isolation = Isolation(NO_NETWORK in lines, shown if NO_FILES in lines else [], FILTERED in lines)
    return isolation if isolation.complete else isolation._replace(why_not=reasons[0] if reasons else DIED)


@functools.cache
def probe_in_child() -> Isolation:
    """As `probe_isolation`, for a process that uses MPI: a child of the fork server finds out."""
    from hpcrl.sandbox import fork_server

    isolation: Isolation | None = fork_server.call(probe_isolation)
    return isolation or Isolation(False, [], False, DIED)


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
