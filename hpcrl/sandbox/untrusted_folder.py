"""Paths in a folder that untrusted code, or an untrusted archive, has written to.

Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def made_below(root: str, place: str, *, is_folder: bool = True) -> Iterator[str]:
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
