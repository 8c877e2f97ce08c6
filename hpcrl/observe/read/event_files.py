"""TensorBoard's event files of a run: each start of a run opens a new one, so they say which steps it took and when,
also the steps that a kill lost and that metrics.jsonl no longer has.

The format is that of TFRecord: uint64 length, crc, payload, crc; a payload is a protobuf message `Event`, whose first
fields are the time, a double, and the step, a varint.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.sandbox.foreign_files import is_folder, open_file

FOLDER = "tensorboard"
MOST_BYTES = 512 * 2**20  # of a file; larger ones are not read
LONGEST_RECORD = 64 * 2**20

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+)\.\d+\.\d+")
_LENGTH = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_SUMMARY = 0x2A  # tag of Event.summary


@dataclass(frozen=True)
class EventFile:
    """opened, first_time, last_time: seconds since the epoch. Steps: None if no step was logged."""

    path: Path
    opened: int
    host: str
    first_step: int | None = None
    last_step: int | None = None
    first_time: float | None = None
    last_time: float | None = None


def event_files(run: Path) -> list[EventFile]:
    """The event files of all starts, in the order in which they were opened: also those in `attempt_<n>`, which the
    next start without a checkpoint has set aside. Files that cannot be read have no steps."""
    folders = [folder for folder in (run / FOLDER, *run.glob(f"attempt_*/{FOLDER}")) if is_folder(folder, run)]
    named = ((_NAME.fullmatch(path.name), path) for folder in folders for path in folder.glob("*tfevents*"))
    found = (_read(path, run, int(name[1]), name[2]) for name, path in named if name)
    return sorted(found, key=lambda file: file.opened)


def _read(path: Path, run: Path, opened: int, host: str) -> EventFile:
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None
    try:
        for step, when in _summaries(path, run):
            first = first or (step, when)
            last = max(last or first, (step, when))
    except OSError:
        pass
    if first is None or last is None:
        return EventFile(path, opened, host)
    return EventFile(path, opened, host, first[0], last[0], first[1], last[1])


def _summaries(path: Path, run: Path) -> Iterator[tuple[int, float]]:
    """(step, time) of each summary of a training step, up to the first record that is torn. Those of step 0 are left
    out: it is also the step of what belongs to no step, such as the hyperparameters."""
    with open_file(path, run, most=MOST_BYTES) as file:
        while len(header := file.read(12)) == 12:
            (length,) = _LENGTH.unpack_from(header)
            if length > LONGEST_RECORD or len(payload := file.read(length)) < length:
                return
            file.seek(4, 1)
            if length < 10 or payload[0] != 0x09:
                continue
            step, place = 0, 9
            if payload[place] == 0x10:
                step, place = _varint(payload, place + 1)
            if payload[place : place + 1] == bytes([_SUMMARY]) and 0 < step < 2**53:
                yield step, _TIME.unpack_from(payload, 1)[0]


def _varint(payload: bytes, place: int) -> tuple[int, int]:
    """(value, place after it)"""
    value = shift = 0
    while place < len(payload) and shift < 64:
        byte = payload[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            break
    return value, place
