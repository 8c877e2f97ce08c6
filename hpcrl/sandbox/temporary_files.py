"""The folder for temporary files of a rank and its children: made, and removed after a kill.

It is multiprocessing's, which children inherit: `pymp-<random>` in the system's folder for temporary files, for its
user only. Its file `processes` has a line for the rank and one for the rank's fork server. The server removes the
folder if the rank was killed. If the server was killed as well, the user's next start on this host removes it.

Imported in children: standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from multiprocessing import util

from hpcrl.sandbox.process_identity import boot_id, pid_namespace, process_runs, started_at

PROCESSES = "processes"  # in the folder


def make_folder() -> str:
    """Make this rank's folder, and remove those whose processes have ended. Returns its path."""
    folder = util.get_temp_dir()
    add_process(folder)
    remove_leftovers(os.path.dirname(folder))
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


def add_process(folder: str) -> None:
    """Keep the folder as long as this process runs."""
    with suppress(OSError), open(os.path.join(folder, PROCESSES), "a") as file:
        file.write(f"{boot_id()} {pid_namespace()} {os.getpid()} {started_at(os.getpid())}\n")


def remove_leftovers(parent: str) -> None:
    """Remove folders in `parent` that were this user's and that no process uses any more."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith("pymp-"):
                with suppress(OSError, ValueError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_left(entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)  # follows no link


def _is_left(folder: str) -> bool:
    """Whether all processes of a folder have ended, as far as this process can see them."""
    with open(os.path.join(folder, PROCESSES)) as file:
        lines = [line.split() for line in file]
    return bool(lines) and all(
        (boot, namespace) == (boot_id(), pid_namespace()) and process_runs(int(pid), int(started)) is False
        for boot, namespace, pid, started in lines
    )
