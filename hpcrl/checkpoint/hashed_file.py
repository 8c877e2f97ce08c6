"""A new file of a checkpoint: hashed while it is written, on disk when it is closed, an error if it is not whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from hpcrl.checkpoint.manifest import FileEntry

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
