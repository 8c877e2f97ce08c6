"""What a rank's trace file holds: `<run>/trace/rank_00003.log`, one record for each step.

A record is a msgpack map in the framing of `hpcrl.observe.record.archive.RecordLog`. Its times are int64 nanoseconds of
the rank's monotonic clock. `events` is msgpack again, so that a reader can skip it: lists of integers, with times as
differences and names as indices into `names`. Offsets of the nodes' clocks are measured by messages between rank 0 and
one rank of each other node.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from hpcrl.observe.record.archive import Record
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
        """kernel: equal on ranks that share a clock. Collective over `comm`."""
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


def _rows(flat: list[int], width: int) -> Iterator[tuple[Any, ...]]:
    columns = iter(flat)
    return zip(*[columns] * width, strict=True)
