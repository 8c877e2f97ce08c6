"""What a checkpoint from somebody else may not do: name files outside its folder, ask for objects in place of tensors,
or unpack to more than it holds. Each function raises ValueError with what it found."""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
from pathlib import Path, PurePath
from typing import IO, Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


def check_metadata(metadata: Any, folder: Path) -> None:
    """Only tensors, in parts of plain files right in `folder`."""
    if type(metadata) is not Metadata:
        raise ValueError(f".metadata holds a {type(metadata).__name__}; expected Metadata")
    for name, entry in metadata.state_dict_metadata.items():
        # Torch would unpickle whatever stands in place of a tensor.
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f".metadata says that {name!r} is a {type(entry).__name__}; expected a tensor")
    sizes: dict[str, int] = {}
    for index, part in metadata.storage_data.items():
        name = part.relative_path
        if name not in sizes:
            sizes[name] = size_of_plain_file(folder, name)
        if not 0 <= part.offset <= part.offset + part.length <= sizes[name]:
            raise ValueError(f"{name} has {sizes[name]} bytes; {index.fqn} is said to be behind them")
        if getattr(part, "transform_descriptors", None):
            raise ValueError(f"{name}: {index.fqn} is said to be packed with {part.transform_descriptors}")


def size_of_plain_file(folder: Path, name: object) -> int:
    """Of a file right in `folder` that is neither a link nor a pipe or the like."""
    if not isinstance(name, str) or PurePath(name).name != name:
        raise ValueError(f".metadata names the file {name!r}; expected one in {folder}")
    found = os.lstat(folder / name)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is no plain file; a checkpoint holds no links")
    return found.st_size


def check_archive(file: IO[bytes], start: int, size: int, what: str) -> None:
    """The `size` bytes of `file` from `start` on are a zip archive as torch.save writes it: nothing in it is
    compressed, and its records take no more than their place."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(file, start, size))) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{what}: {error}; expected what torch.save writes") from None
    unpacked = sum(record.file_size for record in records)
    if unpacked > size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(f"{what} has {size} bytes, and its records unpack to {unpacked}; expected none compressed")


class _Window(io.RawIOBase):
    """A part of a file, to be read like a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        if self._at < 0:
            raise OSError(errno.EINVAL, "seek before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
