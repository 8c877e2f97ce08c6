"""A file of records that survives the end of its writer, however sudden.

A record is uint32 length, uint32 crc32 of the payload, and the payload in msgpack (little endian).
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

_HEADER = struct.Struct("<II")

Record = dict[str, Any]


class RecordLog:
    """What `append` has taken is with the operating system: it survives a `kill -9`, though not a power loss."""

    def __init__(self, path: str | os.PathLike[str], *, keep: bool = False) -> None:
        """`keep`: go on behind the last whole record of a log that is there; otherwise it is replaced."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "ab" if keep else "wb")
        if keep:
            self._file.truncate(whole_bytes(path))

    def append(self, record: Record) -> None:
        payload = msgpack.packb(record)
        self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: str | os.PathLike[str], report: Callable[[str], None]) -> Iterator[Record]:
    """The whole records of a log. From the first torn or damaged one on, everything is dropped and reported."""
    count = good_end = 0
    for record, end in _records(path):
        yield record
        count, good_end = count + 1, end
    size = os.path.getsize(path)
    if good_end < size:
        report(
            f"{path}: record {count} at byte {good_end} is torn or damaged; dropped the last {size - good_end} bytes, "
            f"kept {count} samples"
        )


def whole_bytes(path: str | os.PathLike[str]) -> int:
    """Where the last whole record of a log ends."""
    return max((end for _, end in _records(path)), default=0)


def _records(path: str | os.PathLike[str]) -> Iterator[tuple[Record, int]]:
    """Yield (record, byte after it) until the first one that is not whole."""
    start, size = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, crc = _HEADER.unpack(header)
            start += _HEADER.size + length
            # An empty payload is no record: a block of zeros, which a power loss leaves, would pass the crc.
            if length == 0 or start > size:
                return
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != crc:
                return
            try:
                record = msgpack.unpackb(payload)
            except (ValueError, msgpack.UnpackException):
                return
            if not isinstance(record, dict):
                return
            yield record, start


_FILE_NAME = re.compile(r"step_(\d{8,})\.rank_\d+\.gen\.log")


def generation_log(folder: str | os.PathLike[str], step: int, rank: int) -> Path:
    """The log of finished responses, in the rollout archive's folder, from which an interrupted step is resumed."""
    return Path(folder) / f"step_{step:08d}.rank_{rank:05d}.gen.log"


def generation_logs(folder: str | os.PathLike[str]) -> Iterator[tuple[int, Path]]:
    """(step, path) of every such log, those of all ranks."""
    for path in sorted(Path(folder).glob("step_*.gen.log")):
        name = _FILE_NAME.fullmatch(path.name)
        if name:
            yield int(name[1]), path
