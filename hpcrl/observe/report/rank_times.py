"""Busy seconds of each rank in each step, from the ranks' trace files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.observe.record.archive import read_records
from hpcrl.observe.report.charts import evenly_spaced
from hpcrl.observe.trace.records import FOLDER, TraceError, decode

MOST_RANKS = 64  # rows of the heat map: evenly spaced ranks, and those that were reported as slow
MOST_BYTES = 256 * 2**20  # of the files that are read


@dataclass
class RankTimes:
    """busy: step -> seconds between the end of the step before and that of the step, without those in which the rank
    waited for other ranks inside MPI."""

    rank: int
    node: str
    busy: dict[int, float] = field(default_factory=dict)


def rank_times(run: Path, slow: Sequence[int], notes: list[str]) -> list[RankTimes]:
    """The times of the ranks, in their order; [] for a run without traces. `slow`: ranks that must be among them."""
    named = {path.stem.removeprefix("rank_"): path for path in (run / FOLDER).glob("rank_*.log")}
    paths = {int(number): path for number, path in named.items() if number.isdecimal()}
    ranks = sorted(paths)
    chosen = {ranks[index] for index in evenly_spaced(len(ranks), MOST_RANKS)} | (set(slow) & set(ranks))
    if len(chosen) < len(ranks):
        notes.append(f"busy time: {len(chosen)} of {len(ranks)} ranks are shown")
    found: list[RankTimes] = []
    left = MOST_BYTES
    for rank in sorted(chosen, key=lambda rank: (rank not in slow, rank)):
        left -= paths[rank].lstat().st_size
        if left < 0:
            notes.append(f"busy time: traces of {len(chosen) - len(found)} ranks are not read, which are too large")
            break
        times = _read(rank, paths[rank], run, notes)
        if times.busy:
            found.append(times)
    return sorted(found, key=lambda times: times.rank)


def _read(rank: int, path: Path, run: Path, notes: list[str]) -> RankTimes:
    times = RankTimes(rank, "")
    try:
        for record in read_records(path, lambda line: None, run):
            step = decode(record | {"events": b""})
            if not step.is_rest:
                times.busy[step.step] = max(step.ended - step.began - step.waited, 0.0)
                times.node = step.node
    except (OSError, TraceError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
    return times
