"""This rank's trace while a job runs: a record at the end of each step, appended to the rank's own file."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.observe.record.archive import Record, RecordLog, whole_records
from hpcrl.observe.trace.records import Alignment, ClockAligner, encode, trace_path, trace_paths
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.mpi import broadcast_object
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)

LARGEST_FILE = 4 * 2**20  # bytes; then steps are thinned
NEWEST = 50  # steps that are never thinned
ALIGN_SECONDS = 60.0  # between two measurements of the clocks


class TraceFile:
    """A rank's file of records. When it exceeds `largest_bytes`, every other step is dropped, except the newest ones: a
    step stays if it is a multiple of 2, then of 4, and so on, so that ranks keep the same ones.

    Records of `first_step` and later, of an earlier attempt, are dropped when the first record is written. A file that
    cannot be written costs a warning.
    """

    def __init__(self, path: Path, first_step: int, largest_bytes: int = LARGEST_FILE) -> None:
        self._path, self._first_step, self._largest_bytes = path, first_step, largest_bytes
        self._log: RecordLog | None = None
        self._stride = 1
        self._has_warned = False

    def append(self, record: Record) -> None:
        try:
            if self._log is None:
                discard_from(self._path, self._first_step)
                self._log = RecordLog(self._path, keep=True)
            self._log.append(record)
            if os.path.getsize(self._path) > self._largest_bytes:
                self._thin(record["step"] - NEWEST)
        except OSError as error:
            self._first_step = record["step"] + 1  # what is whole stays
            self.close()
            if not self._has_warned:
                log.warning("the trace cannot be written: %s; the run continues and tries again", error)
            self._has_warned = True

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _thin(self, newest: int) -> None:
        records = [record for record, _ in whole_records(self._path)]
        while True:
            remaining = [one for one in records if one["step"] > newest or one["step"] % self._stride == 0]
            if sum(len(one["events"]) for one in remaining) < self._largest_bytes / 2:
                break
            if self._stride >= newest:  # the newest steps are larger
                remaining = records[len(records) // 2 :]
                break
            self._stride *= 2
        self.close()
        draft = self._path.with_suffix(".tmp")
        rewritten = RecordLog(draft)
        for record in remaining:
            rewritten.append(record)
        rewritten.close()
        os.replace(draft, self._path)
        self._log = RecordLog(self._path, keep=True)


class RankTrace:
    """Records this rank's spans from `begin` to `close`, which are collective over the job's ranks.

    Args:
        run: the run's folder.
        first_step: the first step that this slice takes.
        every: keep the trace of every N-th step.
    """

    def __init__(self, run: Path, rank: int, first_step: int, every: int = 1) -> None:
        self._rank, self._every, self._last_step = rank, every, first_step - 1
        self._file = TraceFile(trace_path(run, rank), first_step)
        self._node = node_name()
        self._slice_ns = 0
        self._aligned_at = 0.0
        self._new: list[Alignment] = []  # since the last record
        self._newest: list[Alignment] = []
        self._aligner: ClockAligner
        self._has_steps = False  # in this slice

    def begin(self, comm: MPI.Intracomm) -> None:
        """Measure the clocks, and begin to record. Collective over `comm`."""
        self._slice_ns = broadcast_object(comm, time.time_ns())
        self._aligner = ClockAligner(comm)
        self.align()
        spans.start()

    def align(self) -> None:
        """Measure this rank's clock again. Collective."""
        self._new.append(self._aligner.measure())
        self._aligned_at = self._new[-1].at

    def is_alignment_due(self) -> bool:
        return time.perf_counter() - self._aligned_at > ALIGN_SECONDS

    def end_step(self, step: int) -> None:
        """Write what was recorded since the last call."""
        self._write(step)
        self._last_step, self._has_steps = step, True

    def close(self) -> None:
        """Write what follows the last step of the slice, and stop recording."""
        if spans.enabled:
            if self._has_steps:
                self._write(self._last_step, is_rest=True)
            spans.stop()
        self._file.close()

    def _write(self, step: int, *, is_rest: bool = False) -> None:
        events = spans.take()
        if step % self._every and step != 1:
            return
        clock = self._newest + self._new
        self._newest, self._new = (self._new or self._newest)[-1:], []
        record = encode(
            events,
            step=step,
            rank=self._rank,
            node=self._node,
            slice_ns=self._slice_ns,
            wall=time.time() - time.perf_counter(),
            clock=clock,
            is_rest=is_rest,
        )
        self._file.append(record)


def discard_from(path: Path, step: int) -> None:
    """Cut a rank's file before its first record of `step` or later, which a resumed run writes again."""
    if not path.exists():
        return
    end = 0
    for record, end_of_record in whole_records(path):
        if record.get("step", step) >= step:
            break
        end = end_of_record
    os.truncate(path, end)


def discard_other_ranks(run: Path, step: int, num_ranks: int) -> None:
    """As `discard_from`, of ranks that the run had before and has no longer."""
    for rank, path in trace_paths(run).items():
        if rank >= num_ranks:
            discard_from(path, step)
