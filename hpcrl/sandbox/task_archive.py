"""The files of a task in a tar archive, unpacked into a folder: regular files, folders, and links that stay inside.

Anything else is an error in one line that names the entry, and nothing is left of the folder. Standard library only.
"""

from __future__ import annotations

import bz2
import fcntl
import gzip
import io
import logging
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EEXIST, EISDIR, ENOENT, ENOTDIR, EWOULDBLOCK
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

from hpcrl.sandbox.foreign_files import ForeignFileError, open_file, printable
from hpcrl.sandbox.mounts import created_below

log = logging.getLogger(__name__)

MB = 2**20
MOST_HEADER = MB  # bytes before the data of an entry: its name, and attributes that are not used
MOST_DEPTH = 100  # folders in folders
OPENERS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
DAMAGED = (tarfile.TarError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError, ValueError, OverflowError)


class Most(NamedTuple):
    """Limits of what an archive may hold."""

    megabytes: int = 4096
    files: int = 200_000  # and folders and links


DEFAULT = Most()


def unpack(archive: Path, folder: Path, most: Most = DEFAULT) -> None:
    """Unpack a tar archive (also with gzip, bzip2 or xz) as a new folder, which appears when all of it is there.

    Files are the user's, without set-user-id bits. Raises ForeignFileError for an archive that is damaged, too large,
    or has an entry that is not allowed; FileExistsError if there is such a folder; BlockingIOError if another process
    is unpacking into it.
    """
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} exists; remove it, or choose another folder")
    with _draft(folder) as draft:
        with open_file(archive) as file:
            try:
                _unpack(file, archive, draft, most)
            except DAMAGED as error:
                raise ForeignFileError(archive, f"not a whole tar archive ({error})", "one") from None
        os.rename(draft, folder)


def _unpack(file: BinaryIO, archive: Path, draft: str, most: Most) -> None:
    start = file.read(8)
    file.seek(0)
    opener = next((opener for magic, opener in OPENERS if start.startswith(magic)), None)
    reader = _Reader(cast(BinaryIO, opener(file)) if opener else file)
    num_bytes = num_files = 0
    with tarfile.open(fileobj=cast(BinaryIO, reader), mode="r:") as entries:
        while (entry := entries.next()) is not None:
            entries.members = []  # type: ignore[attr-defined]  # tarfile keeps all
            num_files += 1
            num_bytes += entry.size
            wrong = _why_not(entry)
            if num_files > most.files:
                wrong = wrong or ("one too many", f"at most {most.files} files")
            if num_bytes > most.megabytes * MB:
                wrong = wrong or (f"{num_bytes} bytes with those before it", f"at most {most.megabytes} MB")
            if not wrong:
                try:
                    _make(entry, entries, reader, draft)
                except OSError as error:
                    if error.errno not in (ENOTDIR, EEXIST, EISDIR, ENOENT):
                        raise OSError(error.errno, error.strerror, f"{draft}/{entry.name}") from None
                    wrong = "behind a link, or in the place of a folder", "a path of its own"
            if wrong:
                raise ForeignFileError(f"{archive}: {printable(entry.name, one_line=True)[:200]}", *wrong)
            reader.left = MOST_HEADER


def _why_not(entry: tarfile.TarInfo) -> tuple[str, str] | None:
    """What is wrong with an entry, and what was expected."""
    for name in [entry.name, *([entry.linkname] if entry.islnk() else [])]:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            return "a path that leads out" if name == entry.name else f"a link that leads out: {name!r:.200}", "inside"
        if len(_parts(name)) > MOST_DEPTH:
            return "folders nested too deeply", f"at most {MOST_DEPTH}"
    if entry.issym():
        target = PurePosixPath(entry.linkname).parts
        num_up = next((number for number, part in enumerate(target) if part != ".."), len(target))
        if entry.linkname.startswith("/") or num_up >= len(_parts(entry.name)) or ".." in target[num_up:]:
            return f"a link that leads out: {entry.linkname!r:.200}", "inside"
        return None
    if entry.issparse():
        return "a sparse file", "a whole one (tar without --sparse)"
    if not (entry.isreg() or entry.isdir() or entry.islnk()):
        return "a device" if entry.ischr() or entry.isblk() else "a special file", "files, folders and links"
    return None


def _make(entry: tarfile.TarInfo, entries: tarfile.TarFile, reader: _Reader, draft: str) -> None:
    *parents, name = _parts(entry.name) or [""]
    if entry.isdir():
        with created_below(draft, entry.name if name else "") as subfolder:
            os.chmod(subfolder, entry.mode & 0o777 | 0o700)
        return
    with created_below(draft, "/".join(parents)) as parent:
        path = f"{parent}/{name}"
        with suppress(FileNotFoundError):
            os.unlink(path)  # of two with one name the last one counts
        if entry.issym():
            os.symlink(entry.linkname, path)
        elif entry.islnk():
            *above, target = _parts(entry.linkname)
            with created_below(draft, "/".join(above)) as folder:
                if not stat.S_ISREG(os.lstat(f"{folder}/{target}").st_mode):
                    raise FileNotFoundError(ENOENT, entry.linkname)
                os.link(f"{folder}/{target}", path, follow_symlinks=False)
        else:
            data = entries.extractfile(entry)
            assert data is not None
            reader.left = entry.size + MOST_HEADER
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(data, file, MB)
                os.fchmod(file.fileno(), entry.mode & 0o777 | 0o600)
            os.utime(path, (0, min(max(float(entry.mtime), 0), 2**32)))


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


class _Reader(io.RawIOBase):
    """A file that reads at most `left` bytes: a small archive may have a header of gigabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left = MOST_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            raise ValueError(f"a header of more than {MOST_HEADER} bytes")
        data = self._file.read(size)
        self.left -= len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset - self._file.tell() > MOST_HEADER:
            raise ValueError(f"a header of more than {MOST_HEADER} bytes")
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _draft(folder: Path) -> Iterator[str]:
    """A new folder beside `folder`, which is removed at the end if it is still there."""
    place = str(folder.with_name(f".{folder.name}.unpacking"))
    with suppress(FileExistsError):
        os.mkdir(place, 0o700)
    with _locked(place):
        try:
            if leftovers := os.listdir(place):
                log.warning("%s: removed; an unpacking that was killed had left %d entries", place, len(leftovers))
                for name in leftovers:
                    path = f"{place}/{name}"
                    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _locked(place: str) -> Iterator[None]:
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise ForeignFileError(place, "another user's folder", "none")
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # others: file systems without locks
            if error.errno == EWOULDBLOCK:
                raise BlockingIOError(EWOULDBLOCK, "another process is unpacking into this folder", place) from None
        yield
    finally:
        os.close(folder)
