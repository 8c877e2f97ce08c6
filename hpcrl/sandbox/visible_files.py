"""The files that programs under test see: the system's programs, and what Python needs. Linux only.

A virtual environment, or a folder in LD_LIBRARY_PATH, may be the folder of the user's project. So neither is shown as a
whole, but only the parts that Python reads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/urandom"),  # not /dev/zero: mapped, it is memory that no process shows
)
MODULES = "bz2 ctypes hashlib lzma sqlite3 ssl zlib numpy"  # which load shared libraries
LIBRARY = re.compile(r".*\.(so(\.[\w.]+)?|a|la|o)")


def visible_paths(packages: Iterable[str]) -> list[str]:
    """Files and folders that this interpreter needs to run with the folders `packages`, none of them below another."""
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
    searched = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), f"{sys.base_prefix}/lib"]
    paths: list[str] = []
    for file in files:
        if is_below(file, shown):
            continue
        for folder in filter(os.path.isdir, {os.path.dirname(file), *filter(os.path.isabs, searched)}):
            with os.scandir(folder) as entries:
                libraries = {entry.name for entry in entries if entry.is_file() and LIBRARY.fullmatch(entry.name)}
            names = [name for name in libraries if os.path.samefile(f"{folder}/{name}", file)]
            if names and len(libraries) == len(os.listdir(folder)):
                paths.append(folder)
            else:
                paths += [f"{folder}/{name}" for name in names]
    return paths
