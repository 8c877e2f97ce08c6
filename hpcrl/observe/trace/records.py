"""The trace files of a run, `<run>/trace/rank_00003.log`: a record for each step, and their reader.

A record is a msgpack map in the framing of `hpcrl.observe.record.archive.RecordLog`. Its times are int64 nanoseconds of
the rank's monotonic clock. `events` is msgpack again, so that a reader can skip it: lists of integers, with times as
differences and names as indices into `names`. Offsets of the nodes' clocks are measured by messages between rank 0 and
one rank of each other node. Readers have all ranks on one timeline: rank 0's clock.
"""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from hpcrl.observe.record.archive import Record, read_records
from hpcrl.runtime.launcher import format_spans
from hpcrl.runtime.mpi import all_gather_object, broadcast_object, wait
from hpcrl.runtime.spans import WAIT, Beside, Counter, Events, Instant, Recorded, Transfer

if TYPE_CHECKING:
    from mpi4py import MPI

ROUND_TRIPS = 10
CLOCK_TAG = 7  # on the communicator of commands, results and rows
_TIME = struct.Struct("<d")


class Alignment(NamedTuple):
    """A measurement of this rank's clock: it shows `at` when rank 0's shows `at - offset`. error: the largest possible
    one, half of the shortest round trip. Seconds."""

    at: float
    offset: float
    error: float


class ClockAligner:
    """Measures by how much this rank's clock is ahead of rank 0's.

    Rank 0 reads its clock (t0), sends a message, and reads the clock again when the answer arrives (t2); the answer has
    the other rank's clock (t1). Its offset is t1 - (t0 + t2) / 2 with an error of at most (t2 - t0) / 2: Cristian,
    "Probabilistic clock synchronization", Distributed Computing 3 (1989). Of ROUND_TRIPS the one with the shortest
    round trip counts, as in NTP's clock filter (RFC 5905, section 10). CLOCK_MONOTONIC is one clock for all processes
    of a kernel, so ranks that share a kernel with rank 0 have offset 0, and one rank measures for each other kernel.

    The clocks drift apart by parts per million, which two measurements in a run show; readers interpolate linearly.
    Between slices, which start at different times on different nodes, the nodes' wall clocks count.
    """

    def __init__(
        self, comm: MPI.Intracomm, clock: Callable[[], float] = time.perf_counter, kernel: str | None = None
    ) -> None:
        """Collective over `comm`.

        Args:
            kernel: id of the kernel, equal on ranks that share a clock.
        """
        self._comm, self._clock = comm, clock
        kernels = all_gather_object(comm, kernel or kernel_id())
        self._leaders = sorted({kernels.index(one) for one in kernels} - {0})  # one rank of each other kernel
        self._leader = kernels.index(kernels[comm.rank])

    def measure(self) -> Alignment:
        """Measure this rank's clock. Collective over the communicator."""
        errors: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        for leader in self._leaders:
            if self._comm.rank == 0:
                errors[leader] = min((self._ask(leader) for _ in range(ROUND_TRIPS)), key=lambda pair: pair[1])
            elif self._comm.rank == leader:
                for _ in range(ROUND_TRIPS):
                    self._answer()
        offset, error = broadcast_object(self._comm, errors)[self._leader]
        return Alignment(self._clock(), offset, error)

    def _ask(self, rank: int) -> tuple[float, float]:
        """(offset, error) by one round trip."""
        answer = bytearray(_TIME.size)
        arrived = self._comm.Irecv(answer, source=rank, tag=CLOCK_TAG)
        sent_at = self._clock()
        wait(self._comm.Isend(bytearray(1), dest=rank, tag=CLOCK_TAG))
        wait(arrived)
        back_at = self._clock()
        (other,) = _TIME.unpack(answer)
        return other - (sent_at + back_at) / 2, (back_at - sent_at) / 2

    def _answer(self) -> None:
        wait(self._comm.Irecv(bytearray(1), source=0, tag=CLOCK_TAG))
        wait(self._comm.Isend(_TIME.pack(self._clock()), dest=0, tag=CLOCK_TAG))


def kernel_id() -> str:
    """A name of the running kernel: containers of one node share it, and its clocks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


TRACE_FOLDER = "trace"  # below the run directory
SCHEMA = 1
STEP = "controller.step"  # the span of a step on rank 0


class TraceError(ValueError):
    """A run without a trace, or a record of another format."""

    user_error = True


def trace_path(run: Path, rank: int) -> Path:
    return run / TRACE_FOLDER / f"rank_{rank:05d}.log"


def trace_paths(run: Path) -> dict[int, Path]:
    """Rank -> its file, of the files that are there, in the order of ranks."""
    named = ((path.stem.removeprefix("rank_"), path) for path in (run / TRACE_FOLDER).glob("rank_*.log"))
    return dict(sorted((int(number), path) for number, path in named if number.isdecimal()))


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
        try:
            names, spans, transfers, beside, counters, instants = msgpack.unpackb(self.packed)
            events = Events(self.began, self.ended, self.waited)
            start = last = _ns(self.began)
            for name, after, length, waited, command in _rows(spans, 5):
                last += after
                waited = length if names[name] == WAIT else waited
                events.spans.append(Recorded(last / 1e9, (last + length) / 1e9, names[name], waited / 1e9, command))
            for kind, after, length, *rest in _rows(transfers, 7):
                began = start + after
                events.transfers.append(Transfer(began / 1e9, (began + length) / 1e9, names[kind], *rest))
            for track, name, after, length in _rows(beside, 4):
                began = start + after
                events.beside.append(Beside(began / 1e9, (began + length) / 1e9, names[track], names[name]))
            for name, after, value in _rows(counters, 3):
                events.counters.append(Counter((start + after) / 1e9, names[name], value))
            for name, after in _rows(instants, 2):
                events.instants.append(Instant((start + after) / 1e9, names[name]))
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise TraceError(f"the trace of step {self.step}, rank {self.rank} cannot be read: {error}") from error
        events.num_dropped, events.shortest = self.num_dropped, self.shortest
        return events


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
    """The record of a step.

    Args:
        wall: wall time minus the monotonic clock, in seconds.
    """
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


def _rows(flat: list[int], width: int) -> Iterator[tuple[Any, ...]]:
    columns = iter(flat)
    return zip(*[columns] * width, strict=True)


MARGIN = 1.0  # seconds by which a clock may be wrong before it is corrected


@dataclass(frozen=True)
class Window:
    """A step on rank 0's clock, in seconds: until the next one begins, so with the validation and the save after it.
    wall: wall time minus that clock."""

    step: int
    slice_ns: int
    began: float
    ended: float
    wall: float


@dataclass(frozen=True)
class RankStep:
    """The records of one rank that overlap a window, and its alignments from there on."""

    rank: int
    node: str
    records: list[StepRecord]
    clock: list[Alignment]

    def on_rank_0(self, at: float) -> float:
        """Convert a time of this rank's clock to rank 0's: linear between two alignments, constant outside."""
        return at - offset_at(self.clock, at)

    def overlaps(self, record: StepRecord, began: float, ended: float) -> bool:
        return self.on_rank_0(record.ended) > began - MARGIN and self.on_rank_0(record.began) < ended + MARGIN

    @property
    def error(self) -> float:
        """The largest error of the alignment, in seconds."""
        return max((one.error for one in self.clock), default=0.0)


def offset_at(clock: list[Alignment], at: float) -> float:
    """The offset of a clock at a time, from alignments in the order of their time."""
    if not clock:
        return 0.0
    if at <= clock[0].at:
        return clock[0].offset
    for before, after in itertools.pairwise(clock):
        if at <= after.at:
            share = (at - before.at) / max(after.at - before.at, 1e-9)
            return before.offset + share * (after.offset - before.offset)
    return clock[-1].offset


class TraceFiles:
    """The trace of a run. Files may be missing or torn; `report` gets a line for each problem."""

    def __init__(self, run: Path, report: Callable[[str], None] = lambda line: None) -> None:
        self._run = run
        self._paths = trace_paths(run)
        self._report = report
        self._reported: set[str] = set()
        self._first = min(self._paths, default=0)  # rank 0, unless its file is lost
        self._windows = {window.step: window for window in self._find_windows()}

    @property
    def ranks(self) -> list[int]:
        """Ranks with a file."""
        return list(self._paths)

    @property
    def steps(self) -> list[int]:
        """Recorded steps."""
        return sorted(self._windows)

    def window(self, step: int) -> Window:
        """Raises TraceError if the step is not recorded."""
        if step not in self._windows:
            raise TraceError(f"step {step} is not recorded; recorded: {format_steps(self.steps)}")
        return self._windows[step]

    def read(self, windows: Sequence[Window]) -> Iterator[tuple[Window, RankStep]]:
        """Each rank's records of these steps, one rank after the other. Ranks without any are left out."""
        hulls: dict[int, tuple[float, float]] = {}  # slice -> from the first to the last of its windows
        for one in windows:
            began, ended = hulls.get(one.slice_ns, (one.began, one.ended))
            hulls[one.slice_ns] = min(began, one.began), max(ended, one.ended)
        for rank in self._paths:
            by_slice: dict[int, RankStep] = {}
            for record in self._records(rank):
                hull = hulls.get(record.slice_ns)
                if hull is None:
                    continue
                step = by_slice.setdefault(record.slice_ns, RankStep(rank, record.node, [], []))
                step.clock.extend(one for one in record.clock if not step.clock or one.at > step.clock[-1].at)
                if step.overlaps(record, *hull):
                    step.records.append(record)
                elif step.records and len(hulls) == 1:
                    break  # its alignment, too, is after the steps
            for window in windows:
                step = by_slice.get(window.slice_ns, RankStep(rank, "", [], []))
                records = [one for one in step.records if step.overlaps(one, window.began, window.ended)]
                if records:
                    first = max((n for n, one in enumerate(step.clock) if one.at <= records[0].began), default=0)
                    yield window, RankStep(rank, step.node, records, step.clock[first:])

    def _find_windows(self) -> Iterator[Window]:
        """Windows of all recorded steps. Without rank 0's file, a step is the record of the lowest rank."""
        previous: StepRecord | None = None
        walls: dict[int, float] = {}
        records = list(self._records(self._first, is_index=True)) if self._paths else []
        for number, record in enumerate(records):
            if record.is_rest:
                previous = record
                continue
            is_first = previous is None or previous.slice_ns != record.slice_ns
            began = record.began if is_first or record.step_began is None else record.step_began
            following = records[number + 1] if number + 1 < len(records) else None
            ended = record.ended
            if following is not None and following.slice_ns == record.slice_ns and record.step_began is not None:
                if following.is_rest and following.step == record.step:
                    ended = following.ended
                elif following.step == record.step + 1 and following.step_began is not None:
                    ended = following.step_began
            clock = list(record.clock)
            began, ended = (at - offset_at(clock, at) for at in (began, ended))
            # One for the whole slice, although wall clocks are adjusted, so that its steps follow one another.
            wall = walls.setdefault(record.slice_ns, record.wall + offset_at(clock, record.ended))
            yield Window(record.step, record.slice_ns, began, ended, wall)
            previous = record

    def _records(self, rank: int, *, is_index: bool = False) -> Iterator[StepRecord]:
        def report(line: str) -> None:
            if line not in self._reported:
                self._reported.add(line)
                self._report(line.replace("samples", "records"))

        path = self._paths[rank]
        try:
            for record in read_records(path, report, self._run):
                yield decode(record | {"events": b""} if is_index else record)
        except (OSError, TraceError) as error:
            report(f"{path}: {error}")


def format_steps(steps: list[int]) -> str:
    """`1-40, 44, 48-50`, the first and last few of many."""
    texts = format_spans(steps).split(",") if steps else ["none"]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:6], "...", *texts[-5:]])
