"""`manifest.json`: what a checkpoint folder must hold, and files hashed while they are written."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeVar

import xxhash

LONGEST_UNSYNCED = 1 << 30  # bytes; else most of the time of a large file would be its last fsync, which tells nothing


class HashedFile:
    """`with HashedFile(path) as file: file.write(...)`, then `file.entry("name in the manifest")`.

    Torch's zip writer cannot bear an exception in the middle: it writes on. So the first error is kept, what comes
    after it is dropped, and the end of the `with` raises it, an OSError that names the file.
    """

    def __init__(self, path: Path, mode: int = 0o666, tick: Callable[[], None] = lambda: None) -> None:
        """mode: who may read and write it, before the umask. tick: is called when the file system took some bytes."""
        self.path = path
        self.size = 0
        self._digest = xxhash.xxh3_128()
        self._tick = tick
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
                    raise OSError(errno.EIO, "the file system took no more bytes, and did not say why")
                rest = rest[written:]
                self._took(written)
        except OSError as error:
            self._error = error
        return len(view)

    def _took(self, written: int) -> None:
        self._unsynced += written
        if self._unsynced >= LONGEST_UNSYNCED:
            os.fsync(self._file.fileno())
            self._unsynced = 0
        self._tick()

    def flush(self) -> None:
        """Nothing is held back."""

    def entry(self, name: str) -> FileEntry:
        return FileEntry(name, self.size, self._digest.hexdigest())

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._error is None:
                os.fsync(self._file.fileno())  # a quota may show only here
                found = os.fstat(self._file.fileno()).st_size
                if found != self.size:
                    raise OSError(errno.EIO, f"{found} bytes on disk, {self.size} were written")
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if kind is None and self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))


MANIFEST = "manifest.json"
T = TypeVar("T")
R = TypeVar("R")
_CHUNK = 4 << 20  # bytes read at once


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest lists it. path: below the checkpoint's folder, with '/'."""

    path: str
    bytes: int
    xxh3_128: str


def write_manifest(folder: str | os.PathLike[str], written: Sequence[FileEntry] = ()) -> Path:
    """List every file below `folder` as {path, bytes, xxh3_128}. The list carries a hash of its own.

    `written`: what the ranks wrote, as they hashed it then; only other files are read here.
    """
    root = Path(folder)
    known = {entry.path: entry for entry in written}
    others = [name for name in files_below(root) if name not in known and name != MANIFEST]
    known |= {entry.path: entry for entry in _in_parallel(lambda name: hash_file(root / name, name), others)}
    files = [asdict(known[name]) for name in sorted(known)]
    manifest = root / MANIFEST
    manifest.write_text(json.dumps({"files": files, "xxh3_128": _hash_of_list(files)}, indent=1), encoding="utf-8")
    return manifest


def files_below(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]


def verify(folder: str | os.PathLike[str], *, with_links: bool = False) -> list[str]:
    """What is wrong with the folder, one line per file, each beginning with the file's name. Extra files are fine.

    with_links: files may be links, as in a bundle of the user's own; those of a stranger could lead anywhere.
    """
    root = Path(folder)
    try:
        entries = _read(root / MANIFEST)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    # Sizes first: they are free, and hashing reads every byte of what may be terabytes.
    problems = [problem for entry in entries if (problem := _wrong_size(root, *entry[:2], with_links))]
    return problems or [
        problem for problem in _in_parallel(lambda entry: _wrong_content(root, entry), entries) if problem
    ]


def _read(manifest: Path) -> list[tuple[str, int, str]]:
    content = json.loads(read_plain(manifest))
    files = content["files"]
    if _hash_of_list(files) != content["xxh3_128"]:
        raise ValueError("its list of files does not have the hash that it states")
    entries = [(entry["path"], entry["bytes"], entry["xxh3_128"]) for entry in files]
    for name, _, _ in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it lists {name}, which is outside the folder")
    return entries


def read_plain(path: Path) -> str:
    """The text of a file that is no link, pipe or device: a stranger's folder may hold such, and reading one would not
    end, or show another file's content."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{path.name} is no plain file")
    return path.read_text(encoding="utf-8")


def _wrong_size(root: Path, name: str, size: int, with_links: bool) -> str | None:
    try:
        return _other_size(root, name, size, with_links)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _other_size(root: Path, name: str, size: int, with_links: bool) -> str | None:
    path = root / name
    if not path.is_file():
        return f"{name} is missing"
    # The root itself may be a link: that is the user's own arrangement.
    places = [place for place in (path, *path.parents) if place != root and place.is_relative_to(root)]
    if not with_links and any(place.is_symlink() for place in places):
        return f"{name} is or lies behind a link; a checkpoint holds none"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes, expected {size}"


def _wrong_content(root: Path, entry: tuple[str, int, str]) -> str | None:
    name, _, expected = entry
    try:
        found = hash_file(root / name, name).xxh3_128
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == expected else f"{name} has other content than was saved (xxh3_128 {found}, not {expected})"


def _in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Several files at once: a parallel file system is slow one file at a time."""
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
