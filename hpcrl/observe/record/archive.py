"""The rollout archive: all samples of each step, for people to read and for `trainer.rollouts_from` to replay.

During a step each rank appends records to its own log, which survives a `kill -9`; at the end of the step rank 0 merges
the logs into one HDF5 file:

    step_00000020.rank_00003.log       records: uint32 length, uint32 crc32 of the payload, the payload
                                       in msgpack; little endian
    step_00000020.h5                   tokens/<column>/{values,offsets}, samples/<name>, attributes seed, step,
                                       weight_version, schema = 1

`hpcrl.observe.read.archive` reads the HDF5 files. Pictures of the samples are in the folder pictures: see
`PictureFolder`.

Logs of responses that are generated and not yet trained on are in the same folder, step_00000021.rank_00003.gen.log:
see `generation_log`.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack
import numpy as np

from hpcrl.sandbox.foreign_files import ERRORS, open_file, read_bytes
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    import h5py


_HEADER = struct.Struct("<II")

Record = dict[str, Any]


class RecordLog:
    """A file of records. Appended records survive a `kill -9`, but not a power loss."""

    def __init__(self, path: str | os.PathLike[str], *, keep: bool = False) -> None:
        """Open the log.

        Args:
            keep: append after the last whole record of an existing log; otherwise the log is replaced.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "ab" if keep else "wb")
        if keep:
            self._file.truncate(max((end for _, end in whole_records(path)), default=0))

    def append(self, record: Record) -> None:
        payload = msgpack.packb(record, unicode_errors=ERRORS)
        self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(
    path: str | os.PathLike[str], report: Callable[[str], None], root: Path | None = None
) -> Iterator[Record]:
    """Yield the whole records of a log inside `root`, None: of its folder. Everything from the first torn or damaged
    record on is dropped and reported. Raises OSError."""
    count = good_end = 0
    for record, end in whole_records(path, root):
        yield record
        count, good_end = count + 1, end
    size = os.path.getsize(path)
    if good_end < size:
        report(
            f"{path}: record {count} at byte {good_end} is torn or damaged; dropped the last {size - good_end} bytes, "
            f"kept {count} samples"
        )


def whole_records(path: str | os.PathLike[str], root: Path | None = None) -> Iterator[tuple[Record, int]]:
    """Yield (record, byte after it) until the first one that is not whole."""
    with open_file(path, root) as file:
        start, size = 0, os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, crc = _HEADER.unpack(header)
            start += _HEADER.size + length
            # Reject empty payloads: a block of zeros, left by a power loss, would pass the crc.
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


_GENERATION_LOG = re.compile(r"step_(\d{8,})\.rank_\d+\.gen\.log")


def generation_log(folder: str | os.PathLike[str], step: int, rank: int) -> Path:
    """Path of the log of finished responses, from which an interrupted step is resumed."""
    return Path(folder) / f"step_{step:08d}.rank_{rank:05d}.gen.log"


def generation_logs(folder: str | os.PathLike[str]) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of these logs of all ranks."""
    for path in sorted(Path(folder).glob("step_*.gen.log")):
        name = _GENERATION_LOG.fullmatch(path.name)
        if name:
            yield int(name[1]), path


SCHEMA = 1
# Of steps in trainer.record_update_steps, for each response token: its log-prob in the forward pass of its last update
# and after the step, and the derivative of its policy loss by its log-prob in that pass.
UPDATE_COLUMNS = ("update_log_probs", "new_log_probs", "loss_gradients")
_FILE_NAME = re.compile(r"step_(\d{8,})\.(h5|h5\.tmp|rank_\d+\.log)")

Scalar = int | float | bool | str


class ArchiveError(ValueError):
    """A rollout file that is damaged or in another format."""

    user_error = True


def log_path(folder: str | os.PathLike[str], step: int, rank: int) -> Path:
    return Path(folder) / f"step_{step:08d}.rank_{rank:05d}.log"


def step_path(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder) / f"step_{step:08d}.h5"


class RolloutLog(RecordLog):
    """One rank's records of one step: {"tokens": {column: [dtype, bytes]}, "samples": {name: scalar}}.

    It replaces the log of an earlier, interrupted attempt.
    """

    def append_sample(self, tokens: Mapping[str, np.ndarray], samples: Mapping[str, Any]) -> None:
        """Add one sample.

        NUL in strings, which HDF5 does not support, becomes U+2400.

        Args:
            tokens: column -> (length,) array, one dtype per column.
            samples: name -> number or string; the integer `position` is the sample's place in the step's file.
        """
        if "position" not in samples:
            raise ValueError("a sample needs an integer `position`, its place in the step's file")
        packed = {name: [array.dtype.str, np.ascontiguousarray(array).tobytes()] for name, array in tokens.items()}
        self.append({"tokens": packed, "samples": {name: _plain(value) for name, value in samples.items()}})


def _plain(value: Any) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value.replace("\0", "\u2400")
    if isinstance(value, (bool, int, float)):
        return value
    raise ValueError(f"a sample holds numbers and strings, not {type(value).__name__}")


class PictureFolder:
    """Pictures beside the archive's files in `folder`, a PNG each: a thumbnail of those of prompts, which the data
    files have, and the whole of those that tools returned."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder) / "pictures"
        self._kept: set[str] = set()

    def keep(self, name: str, png: Callable[[], bytes]) -> None:
        """Write a picture if it is not there."""
        if name in self._kept:
            return
        self._kept.add(name)
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with draft_of(path) as draft:  # two ranks may write the same picture
                draft.write_bytes(png())

    def read(self, name: str) -> bytes:
        """Raises ArchiveError if it is not there."""
        try:
            return read_bytes(self._folder / name, self._folder.parent)
        except OSError as error:
            raise ArchiveError(f"{self._folder / name}: {error.strerror or error}; expected a picture") from None

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()


def finish_step(
    folder: str | os.PathLike[str], step: int, *, seed: int, weight_version: int, report: Callable[[str], None] = print
) -> Path:
    """Merge the step's logs, in the order of `position`, into its HDF5 file and remove them.

    Rank 0 calls it after all ranks have closed their logs. A kill at any point leaves the logs or the whole file.
    """
    import h5py  # needed by rank 0 and readers only

    logs = sorted(Path(folder).glob(f"step_{step:08d}.rank_*[0-9].log"))
    records = [record for log in logs for record in read_records(log, report)]
    records.sort(key=lambda record: record["samples"]["position"])
    _check_alike(records, folder, step)
    path = step_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with h5py.File(temporary, "w") as file:
        file.attrs.update({"seed": seed, "step": step, "weight_version": weight_version, "schema": SCHEMA})
        _write_tokens(file.create_group("tokens"), records)
        _write_samples(file.create_group("samples"), records)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)
    for log in logs:
        log.unlink()
    return path


def discard_from(folder: str | os.PathLike[str], step: int) -> None:
    """Remove the archive's files of `step` and later; a resumed run writes them again, possibly with fewer ranks."""
    for path in Path(folder).glob("step_*"):
        name = _FILE_NAME.fullmatch(path.name)
        if name and int(name[1]) >= step:
            path.unlink()


def _check_alike(records: list[Record], folder: str | os.PathLike[str], step: int) -> None:
    if not records:
        return
    where = f"rollout logs of step {step} in {folder}"
    for part in ("tokens", "samples"):
        names = set(records[0][part])
        for record in records:
            if set(record[part]) != names:
                differing = ", ".join(sorted(names ^ set(record[part])))
                raise ArchiveError(f"{where}: only some samples have {differing}; all must have the same {part}")
    positions = [record["samples"]["position"] for record in records]
    for position, following in itertools.pairwise(positions):
        if position == following:
            raise ArchiveError(f"{where}: two samples have position {position}; remove the logs of an earlier attempt")


def _write_tokens(group: h5py.Group, records: list[Record]) -> None:
    for name in sorted(records[0]["tokens"]) if records else ():
        rows = [np.frombuffer(data, dtype) for dtype, data in (record["tokens"][name] for record in records)]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        column = group.create_group(name)
        _write(column, "values", np.concatenate(rows))
        _write(column, "offsets", offsets)


def _write_samples(group: h5py.Group, records: list[Record]) -> None:
    import h5py

    text = h5py.string_dtype("utf-8")
    for name in sorted(records[0]["samples"]) if records else ():
        values = [record["samples"][name] for record in records]
        if any(isinstance(value, str) for value in values):
            if not all(isinstance(value, str) for value in values):
                raise ArchiveError(f"samples/{name} holds strings and numbers; use one kind")
            group.create_dataset(name, data=values, dtype=text)
        else:
            _write(group, name, np.array(values))


def _write(group: h5py.Group, name: str, values: np.ndarray) -> None:
    # Fletcher-32 detects flipped bits on reading; it needs chunks, which empty datasets do not have.
    group.create_dataset(name, data=values, **({"fletcher32": True} if len(values) else {}))


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
