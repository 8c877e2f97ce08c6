"""Files that are written where other users may write too, and JSON files that are replaced whole.

Another user may have put a link at a path that the user names, so that what the user writes replaces the link's target.
The folders of runs are checked once instead (`hpcrl.runtime.run_folder`).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hpcrl.sandbox import foreign_files
from hpcrl.sandbox.foreign_files import ERRORS


@contextmanager
def draft_of(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside `path` with a name that cannot be guessed. It replaces `path`, a link too, at the end of the
    `with`; after an error it is removed.

    For a device or a pipe, such as /dev/stdout: `path` itself.

    Args:
        mode: permissions before the umask.
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
        value = foreign_files.read_json(path, root)
    except (OSError, ValueError):
        return absent
    return value if isinstance(value, type(absent)) else absent


def replace_json(path: Path, value: Any) -> None:
    """Write a file that is either the old one or the new one."""
    with draft_of(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
