"""Files that are written where other users may write too, JSON files that are replaced whole, and temporary files.

Another user may have put a link at a path that the user names, so that what the user writes replaces the link's target.
The folders of runs are checked once instead (`hpcrl.runtime.run_folder`).

The folder for temporary files of a rank and its children is multiprocessing's, which children inherit: `pymp-<random>`
in the system's folder for temporary files, for its user only. Its file `processes` has a line for the rank and one for
the rank's fork server. The server removes the folder if the rank was killed. If the server was killed as well, the
user's next start on this host removes it.

Imported in children: standard library only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hpcrl.sandbox import foreign_files
from hpcrl.sandbox.foreign_files import ERRORS
from hpcrl.sandbox.process_tree import boot_id, pid_namespace, process_runs, started_at


@contextmanager
def draft_of(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside `path` with a name that cannot be guessed. It replaces `path`, a link too, at the end of the
    `with`; after an error it is removed. mode: permissions before the umask.

    For a device or a pipe, such as /dev/stdout: `path` itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")  # libraries look at the suffix
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def create_in_place(path: Path) -> TextIO:
    """An empty file in the place of a file or a link of this name."""
    path.unlink(missing_ok=True)
    return open(path, "x", encoding="utf-8", errors=ERRORS)


def open_to_append(path: Path) -> BinaryIO:
    """The file, which is made if need be. Raises OSError (ELOOP) for a link that another user has made."""
    is_own_link = path.is_symlink() and path.lstat().st_uid == os.geteuid()
    follow = 0 if is_own_link else os.O_NOFOLLOW
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | follow, 0o666))


def read_json_or(path: Path, absent: Any, root: Path | None = None) -> Any:
    """Contents of the file, which is inside `root`; `absent` if it is missing or damaged, or holds a value of another
    type."""
    try:
        found = foreign_files.read_json(path, root)
    except (OSError, ValueError):
        return absent
    return found if isinstance(found, type(absent)) else absent


def replace_json(path: Path, value: Any) -> None:
    """Write a file that is either the old one or the new one."""
    with draft_of(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


PROCESSES_FILE = "processes"  # in the folder
SECONDS_TO_START = 3600.0  # from the start of mpiexec to the end of its ranks' MPI_Init, at most
CLOCK_ERROR = 60.0  # seconds by which the clock may have been corrected since a process began


def make_temporary_folder() -> str:
    """Make this rank's folder, and remove those whose processes have ended. Returns its path."""
    folder = util.get_temp_dir()
    keep_temporary_folder(folder)
    remove_leftovers(os.path.dirname(folder))
    remove_leftovers_of_mpiexec()
    return folder


def set_compiler_cache() -> None:
    """Set the folder in which torch.compile looks for code to run: torch's own choice, which other users can guess and
    make first, unless it is not only this user's. Then it is in this rank's folder, and nothing is reused."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    import getpass  # here, because child processes import this module

    folder = os.path.join(util.get_temp_dir(), "compiled")
    with suppress(OSError, KeyError):  # a user without a name
        usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        with suppress(FileExistsError):
            os.mkdir(usual, 0o700)
        found = os.lstat(usual)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            folder = usual
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def keep_temporary_folder(folder: str) -> None:
    """Keep the folder as long as this process runs."""
    with suppress(OSError), open(os.path.join(folder, PROCESSES_FILE), "a") as file:
        file.write(f"{boot_id()} {pid_namespace()} {os.getpid()} {started_at(os.getpid())}\n")


def remove_leftovers(parent: str) -> None:
    """Remove folders in `parent` that were this user's and that no process uses any more."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith("pymp-"):
                with suppress(OSError, ValueError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_left(entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)  # follows no link


def remove_leftovers_of_mpiexec(parent: str = "/tmp") -> None:
    """Remove the descriptions of the node that MPICH's mpiexec, which ignores TMPDIR, has left when it was killed.

    A proxy of mpiexec writes one after it has started, and its ranks read it in MPI_Init. So it is left over if it is
    old (proxies in other containers cannot be seen), and no proxy of the user began before it.
    """
    with suppress(OSError), os.scandir(parent) as entries:
        found = [(e.path, e.stat(follow_symlinks=False)) for e in entries if e.name.startswith("hydra_hwloc_xmlfile_")]
        latest = time.time() - SECONDS_TO_START
        left = [(path, of.st_mtime) for path, of in found if of.st_uid == os.geteuid() and of.st_mtime < latest]
        began = min(map(_began, _proxies()), default=latest) if left else latest
        for path, written in left:
            if written < began - CLOCK_ERROR:
                with suppress(OSError):
                    os.unlink(path)


def _proxies() -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/comm") as file:
            if file.read() == "hydra_pmi_proxy\n":
                yield int(name)


def _began(pid: int) -> float:
    """Seconds since 1970; now, for a process that has ended."""
    ticks = started_at(pid)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (now - ticks / os.sysconf("SC_CLK_TCK") if ticks not in (None, -1) else 0.0)


def _is_left(folder: str) -> bool:
    """Whether all processes of a folder have ended, as far as this process can see them."""
    with open(os.path.join(folder, PROCESSES_FILE)) as file:
        lines = [line.split() for line in file]
    return bool(lines) and all(
        (boot, namespace) == (boot_id(), pid_namespace()) and process_runs(int(pid), int(started)) is False
        for boot, namespace, pid, started in lines
    )
