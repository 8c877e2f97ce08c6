"""Writing by way of a folder on the node: the copy in memory goes as soon as the fast disk has it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpcrl.checkpoint.manifest import FileEntry, HashedFile

log = logging.getLogger(__name__)
_CHUNK = 8 << 20  # bytes copied at once


def write_file(
    target: Path,
    write: Callable[[HashedFile], None],
    scratch: str | None,
    then: Callable[[], None],
    tick: Callable[[], None] = lambda: None,
) -> FileEntry:
    """Have `write` fill the file `target`, and call `then` once what it writes need not be kept any more.

    scratch: folder on this node to which it is written first; `$NAME` stands for a variable of the environment. Where
    that cannot be done, a line says so, and the file is written straight to its place.
    tick: is called while it gets on.
    Gives the entry of `target` under its bare name; raises OSError where it cannot be written.
    """
    draft = _draft(_scratch_path(scratch, target), write, tick) if scratch is not None else None
    if draft is None:
        with HashedFile(target, tick=tick) as file:
            write(file)
        then()
        return file.entry(target.name)
    then()
    try:
        return _copy(draft, target, tick)
    finally:
        draft.path.unlink(missing_ok=True)


def _scratch_path(scratch: str, target: Path) -> Path:
    """The same for every checkpoint of a run, so that what a killed attempt left is replaced."""
    run, role = str(target.parents[2]), target.parent.name
    key = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
    return Path(os.path.expandvars(scratch)) / f"hpcrl_{key}_{role}_{target.name}"


def _draft(path: Path, write: Callable[[HashedFile], None], tick: Callable[[], None]) -> HashedFile | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with HashedFile(path, mode=0o600, tick=tick) as draft:  # the folder may be everybody's
            write(draft)
        return draft
    except OSError as error:
        log.warning(
            "trainer.checkpoint.scratch_dir: %s: %s; writing straight to the checkpoint", error.filename, error.strerror
        )
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None


def _copy(draft: HashedFile, target: Path, tick: Callable[[], None]) -> FileEntry:
    with open(draft.path, "rb") as source, HashedFile(target, tick=tick) as file:
        while chunk := source.read(_CHUNK):
            file.write(chunk)
    if (entry := file.entry(target.name)) != draft.entry(target.name):
        raise OSError(errno.EIO, "it does not give back what was written to it", str(draft.path))
    return entry
