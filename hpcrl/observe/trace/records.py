"""What a rank's trace file holds: `<run>/trace/rank_00003.log`, one record for each step.

A record is a msgpack map in the framing of `hpcrl.observe.record.archive.RecordLog`. Its times are int64 nanoseconds of the
rank's monotonic clock. `events` is msgpack again, so that a reader can skip it: lists of integers, with times as
differences and names as indices into `names`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from hpcrl.observe.record.archive import Record
from hpcrl.observe.trace.clocks import Alignment
from hpcrl.runtime.spans import WAIT, Beside, Counter, Events, Instant, Recorded, Transfer

FOLDER = "trace"  # below the run directory
SCHEMA = 1
STEP = "controller.step"  # the span of a step on rank 0


class TraceError(ValueError):
    """A run without a trace, or a record of another format."""

    user_error = True


def trace_path(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank_{rank:05d}.log"


@dataclass(frozen=True)
class StepRecord:
    """One rank's record of one step: from the end of the record before to a moment after the step.

    slice_ns: start of the slice, wall time of rank 0, which identifies it. step_began: when the step began, on rank 0
    only. wall: wall time minus the monotonic clock. is_rest: written at the end of a slice, with what follows its last
    step. Seconds; times are of the rank's monotonic clock.
    """

    step: int
    rank: int
    node: str
    slice_ns: int
    began: float
    ended: float
    wall: float
    waited: float
    step_began: float | None = None
    is_rest: bool = False
    num_dropped: int = 0
    shortest: float = 0.0
    clock: tuple[Alignment, ...] = ()
    packed: bytes = b""

    def events(self) -> Events:
        """Unpack what was recorded. Raises TraceError."""
        return _unpack(self)


def encode(
    events: Events,
    *,
    step: int,
    rank: int,
    node: str,
    slice_ns: int,
    wall: float,
    clock: list[Alignment],
    is_rest: bool = False,
) -> Record:
    """The record of a step. `wall`: wall time minus the monotonic clock, in seconds."""
    steps = [span.began for span in events.spans if span.name == STEP]
    return {
        "step": step,
        "schema": SCHEMA,
        "rank": rank,
        "node": node,
        "slice": slice_ns,
        "began": _ns(events.began),
        "ended": _ns(events.ended),
        "wall": _ns(wall),
        "waited": _ns(events.waited),
        "step_began": _ns(max(steps)) if steps and not is_rest else None,
        "is_rest": is_rest,
        "dropped": [events.num_dropped, _ns(events.shortest)],
        "clock": [list(map(_ns, alignment)) for alignment in clock],
        "events": _pack(events),
    }


def decode(record: Record) -> StepRecord:
    """Raises TraceError for another format."""
    try:
        if record["schema"] != SCHEMA:
            raise TraceError(f"a trace of schema {record['schema']}; this version reads {SCHEMA}")
        seconds = {name: record[name] / 1e9 for name in ("began", "ended", "wall", "waited")}
        began, (num_dropped, shortest) = record["step_began"], record["dropped"]
        return StepRecord(
            step=int(record["step"]),
            rank=int(record["rank"]),
            node=str(record["node"]),
            slice_ns=int(record["slice"]),
            step_began=None if began is None else began / 1e9,
            is_rest=bool(record["is_rest"]),
            num_dropped=int(num_dropped),
            shortest=shortest / 1e9,
            clock=tuple(Alignment(*(value / 1e9 for value in one)) for one in record["clock"]),
            packed=bytes(record["events"]),
            **seconds,
        )
    except (KeyError, TypeError) as error:
        raise TraceError(f"not a record of a trace: {type(error).__name__}: {error}") from error


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _pack(events: Events) -> bytes:
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    start = last = _ns(events.began)
    spans: list[int] = []
    for span in sorted(events.spans, key=lambda span: (span.began, -span.ended)):
        began = _ns(span.began)
        waited = 0 if span.name == WAIT else _ns(span.waited)  # a wait is waited as a whole
        spans += (number(span.name), began - last, _ns(span.ended) - began, waited, span.command)
        last = began
    transfers: list[int] = []
    for sent in events.transfers:
        began = _ns(sent.began)
        transfers += (number(sent.kind), began - start, _ns(sent.ended) - began)
        transfers += (sent.command, sent.source, sent.destination, sent.nbytes)
    beside: list[int] = []
    for work in events.beside:
        began = _ns(work.began)
        beside += (number(work.track), number(work.name), began - start, _ns(work.ended) - began)
    counters = [n for one in events.counters for n in (number(one.name), _ns(one.at) - start, one.value)]
    instants = [n for one in events.instants for n in (number(one.name), _ns(one.at) - start)]
    packed: bytes = msgpack.packb([list(names), spans, transfers, beside, counters, instants])
    return packed


def _unpack(record: StepRecord) -> Events:
    try:
        names, spans, transfers, beside, counters, instants = msgpack.unpackb(record.packed)
        found = Events(record.began, record.ended, record.waited)
        start = last = _ns(record.began)
        for name, after, length, waited, command in _rows(spans, 5):
            last += after
            waited = length if names[name] == WAIT else waited
            found.spans.append(Recorded(last / 1e9, (last + length) / 1e9, names[name], waited / 1e9, command))
        for kind, after, length, *rest in _rows(transfers, 7):
            began = start + after
            found.transfers.append(Transfer(began / 1e9, (began + length) / 1e9, names[kind], *rest))
        for track, name, after, length in _rows(beside, 4):
            began = start + after
            found.beside.append(Beside(began / 1e9, (began + length) / 1e9, names[track], names[name]))
        for name, after, value in _rows(counters, 3):
            found.counters.append(Counter((start + after) / 1e9, names[name], value))
        for name, after in _rows(instants, 2):
            found.instants.append(Instant((start + after) / 1e9, names[name]))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise TraceError(f"the trace of step {record.step}, rank {record.rank} cannot be read: {error}") from error
    found.num_dropped, found.shortest = record.num_dropped, record.shortest
    return found


def _rows(flat: list[int], width: int) -> Iterator[tuple[Any, ...]]:
    columns = iter(flat)
    return zip(*[columns] * width, strict=True)
