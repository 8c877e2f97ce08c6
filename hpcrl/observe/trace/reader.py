"""Reads the trace files of a run, of any of its steps, on one timeline: rank 0's clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.observe.record.archive import read_records
from hpcrl.observe.trace.records import Alignment, StepRecord, TraceError, decode, trace_paths
from hpcrl.runtime.launcher import format_spans

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
