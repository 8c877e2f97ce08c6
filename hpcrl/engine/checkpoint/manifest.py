"""Files of a checkpoint: hashed while they are written, listed in `manifest.json`, and verified."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeVar

import xxhash

from hpcrl.config.paths import expanded
from hpcrl.sandbox.foreign_files import read_json

MAX_UNSYNCED = 1 << 30  # bytes; else the last fsync, which reports no progress, would take most of a large file's time


class HashedFile:
    """A file that is hashed while it is written: `with HashedFile(path) as file: file.write(...)`, then
    `file.entry("name in the manifest")`.

    The first error is stored, later writes are dropped, and the end of the `with` raises it as an OSError with the
    file's name: torch's zip writer continues after an exception.
    """

    def __init__(self, path: Path, mode: int = 0o666, on_progress: Callable[[], None] = lambda: None) -> None:
        """Create the file, which must not exist.

        Args:
            mode: permissions before the umask.
            on_progress: called after the file system accepted some bytes.
        """
        self.path = path
        self.size = 0
        self._digest = xxhash.xxh3_128()
        self._on_progress = on_progress
        self._unsynced = 0
        self._error: OSError | None = None
        self._file = open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.size += len(view)
        try:
            rest = view
            while rest and self._error is None:
                written = self._file.write(rest)
                if not written:
                    raise OSError(errno.EIO, "the file system accepted no more bytes without an error")
                rest = rest[written:]
                self._count(written)
        except OSError as error:
            self._error = error
        return len(view)

    def _count(self, written: int) -> None:
        self._unsynced += written
        if self._unsynced >= MAX_UNSYNCED:
            os.fsync(self._file.fileno())
            self._unsynced = 0
        self._on_progress()

    def flush(self) -> None:
        """Nothing is buffered."""

    def entry(self, name: str) -> FileEntry:
        return FileEntry(name, self.size, self._digest.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._error is None:
                os.fsync(self._file.fileno())  # quotas may be reported only here
                actual = os.fstat(self._file.fileno()).st_size
                if actual != self.size:
                    raise OSError(errno.EIO, f"{actual} bytes on disk, but {self.size} were written")
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if kind is None and self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))


MANIFEST = "manifest.json"
T = TypeVar("T")
R = TypeVar("R")
_CHUNK = 4 << 20  # bytes per read


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest. path: below the checkpoint's folder, with '/'."""

    path: str
    bytes: int
    xxh3_128: str


def write_manifest(folder: str | os.PathLike[str], written: Sequence[FileEntry] = ()) -> Path:
    """List every file below `folder` as {path, bytes, xxh3_128}. The list is hashed itself.

    Args:
        written: entries of files that the ranks hashed while writing; only other files are read here.
    """
    root = Path(folder)
    entries = {entry.path: entry for entry in written}
    unlisted = [name for name in files_below(root) if name not in entries and name != MANIFEST]
    entries |= {entry.path: entry for entry in _in_parallel(lambda name: hash_file(root / name, name), unlisted)}
    files = [asdict(entries[name]) for name in sorted(entries)]
    manifest = root / MANIFEST
    manifest.write_text(json.dumps({"files": files, "xxh3_128": _hash_of_list(files)}, indent=1), encoding="utf-8")
    return manifest


def files_below(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


def verify(folder: str | os.PathLike[str], *, with_links: bool = False) -> list[str]:
    """Return what is wrong with the folder, one line per file, each beginning with the file's name. Extra files are
    allowed.

    Args:
        with_links: allow links, as in a bundle of the user; links from an untrusted source could lead anywhere.
    """
    root = Path(folder)
    try:
        entries = _read(root / MANIFEST)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    # Sizes first: hashing reads every byte, possibly terabytes.
    problems = [problem for entry in entries if (problem := _size_problem(root, *entry[:2], with_links))]
    return problems or list(filter(None, _in_parallel(lambda entry: _content_problem(root, entry), entries)))


def _read(manifest: Path) -> list[tuple[str, int, str]]:
    content = read_json(manifest, links=False)
    files = content["files"]
    if _hash_of_list(files) != content["xxh3_128"]:
        raise ValueError("the hash of its list of files is wrong")
    entries = [(entry["path"], entry["bytes"], entry["xxh3_128"]) for entry in files]
    for name, _, _ in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it lists {name}, which is outside the folder")
    return entries


def _size_problem(root: Path, name: str, size: int, with_links: bool) -> str | None:
    path = root / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        # The root itself may be a link of the user.
        places = [place for place in (path, *path.parents) if place != root and place.is_relative_to(root)]
        if not with_links and any(place.is_symlink() for place in places):
            return f"{name} is or lies behind a link, which checkpoints do not contain"
        actual = path.stat().st_size
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if actual == size else f"{name} has {actual} bytes, expected {size}"


def _content_problem(root: Path, entry: tuple[str, int, str]) -> str | None:
    name, _, expected = entry
    try:
        found = hash_file(root / name, name).xxh3_128
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == expected else f"{name} differs from what was saved (xxh3_128 {found}, expected {expected})"


def _in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Process several files at a time, because parallel file systems are slow for one file."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def hash_file(path: Path, name: str) -> FileEntry:
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(name, size, digest.hexdigest())


def _hash_of_list(files: list[dict[str, object]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


@dataclass(frozen=True)
class SavedPart:
    """A rank's part of a save, reported to rank 0.

    pieces: start and length in its file of each item of its plan, in bytes. problem: one line if the part could not be
    written.
    """

    rank: int
    files: list[FileEntry]
    pieces: list[tuple[int, int]]
    problem: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SavedPart:
        found = json.loads(text)
        files = [FileEntry(**entry) for entry in found.pop("files")]
        return cls(files=files, pieces=[(start, length) for start, length in found.pop("pieces")], **found)


def error_line(error: Exception) -> str:
    """Return one line for an error."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


log = logging.getLogger(__name__)
_COPY_BYTES = 8 << 20  # bytes copied at once


def write_file(
    target: Path,
    write: Callable[[HashedFile], None],
    scratch: str | None,
    on_written: Callable[[], None],
    on_progress: Callable[[], None] = lambda: None,
) -> FileEntry:
    """Let `write` fill the file `target`, and call `on_written` when its data is no longer needed.

    Returns the entry of `target` under its bare name. Raises OSError if it cannot be written.

    Args:
        scratch: folder on this node to write to first, so that the copy in memory is freed as soon as the fast disk has
            it; its variables are those of this rank. If it cannot be used, a warning is logged and the file is written
            directly.
        on_progress: called during writing.
    """
    scratch_file = _write_scratch(scratch, target, write, on_progress) if scratch is not None else None
    if scratch_file is None:
        with HashedFile(target, on_progress=on_progress) as file:
            write(file)
        on_written()
        return file.entry(target.name)
    on_written()
    try:
        return _copy(scratch_file, target, on_progress)
    finally:
        scratch_file.path.unlink(missing_ok=True)


def _write_scratch(
    scratch: str, target: Path, write: Callable[[HashedFile], None], on_progress: Callable[[], None]
) -> HashedFile | None:
    """Write a file whose name starts alike for all checkpoints of a run, so that what a killed attempt left is removed,
    and ends at random: other users of the folder cannot make it first."""
    run, role = str(target.parents[2]), target.parent.name
    key = hashlib.blake2b(os.fsencode(run), digest_size=8).hexdigest()
    stem = f"hpcrl_{key}_{role}_{target.name}."
    path = Path(expanded(scratch)) / f"{stem}{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.iterdir():
            if leftover.name.startswith(stem) and leftover.lstat().st_uid == os.geteuid():
                leftover.unlink(missing_ok=True)
        with HashedFile(path, mode=0o600, on_progress=on_progress) as scratch_file:  # the folder may be shared
            write(scratch_file)
        return scratch_file
    except OSError as error:
        log.warning(
            "trainer.checkpoint.scratch_dir: %s: %s; writing directly to the checkpoint", error.filename, error.strerror
        )
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None


def _copy(scratch_file: HashedFile, target: Path, on_progress: Callable[[], None]) -> FileEntry:
    descriptor = os.open(scratch_file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait
    with open(descriptor, "rb") as source, HashedFile(target, on_progress=on_progress) as file:
        while chunk := source.read(_COPY_BYTES):
            file.write(chunk)
    if (entry := file.entry(target.name)) != scratch_file.entry(target.name):
        raise OSError(errno.EIO, "reading it back gave other data than was written", str(scratch_file.path))
    return entry
