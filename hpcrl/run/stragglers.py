"""Ranks that are slower than their like: statistics of every step, and a line when one stands out for long."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hpcrl.controller.busy import BusyReport
from hpcrl.controller.controller import Controller, Future
from hpcrl.run.memory import memory_metrics
from hpcrl.runtime.watchdog import STRAGGLERS_FILE

log = logging.getLogger(__name__)

RATIO = 1.3  # times the median of its like
EXCESS = 0.5  # seconds a step, at least, before it is worth a word
STEPS = 10  # that are looked at together
FEWEST = 3  # ranks that can be compared

# Who does the same work in a phase as others: (phase, rank) -> anything that is equal for them.
Likeness = Callable[[str, int], Hashable]


class Slow(NamedTuple):
    rank: int
    node: str
    phase: str


def busy_metrics(reports: Sequence[BusyReport]) -> dict[str, float]:
    """`perf/busy_s/<phase>/{min,median,max}` over the ranks that were in the phase."""
    by_phase: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for phase, seconds in report.seconds.items():
            by_phase[phase].append(seconds)
    return {
        f"perf/busy_s/{phase}/{name}": statistic(seconds)
        for phase, seconds in by_phase.items()
        for name, statistic in (("min", min), ("median", median), ("max", max))
    }


def slow_ranks(reports: Sequence[BusyReport], likeness: Likeness) -> dict[Slow, float]:
    """Those that were busy for much longer than the median of their like, and how many times as long."""
    alike: dict[Hashable, list[tuple[BusyReport, str]]] = defaultdict(list)
    for report in reports:
        for phase in report.seconds:
            alike[phase, likeness(phase, report.rank)].append((report, phase))
    found = {}
    for members in alike.values():
        usual = median(report.seconds[phase] for report, phase in members)
        for report, phase in members if len(members) >= FEWEST else []:
            seconds = report.seconds[phase]
            if seconds > RATIO * usual and seconds - usual > EXCESS:
                found[Slow(report.rank, report.node, phase)] = seconds / max(usual, 1e-3)
    return found


def lasting(history: Sequence[dict[Slow, float]]) -> Iterator[tuple[Slow, int, float]]:
    """Who was slow in most of the last STEPS steps, in how many, and the median of how many times as slow."""
    counts = Counter(slow for step in history for slow in step)
    for slow, count in sorted(counts.items()):
        if 2 * count > STEPS:
            yield slow, count, median(step[slow] for step in history if slow in step)


class Stragglers:
    """Lives on rank 0. waits: for all ranks' reports at the end of a step, where no rank is at work on anything then;
    else those of an earlier moment count, as soon as all have come. folder: of the run, for STRAGGLERS_FILE.
    """

    def __init__(self, controller: Controller, folder: Path, *, waits: bool) -> None:
        self._controller = controller
        self._path = folder / STRAGGLERS_FILE
        self._waits = waits
        self._asked: Future[list[BusyReport]] | None = None
        self._history: deque[dict[Slow, float]] = deque(maxlen=STEPS)
        self._told: set[Slow] = set()

    def observe(self, step: int) -> dict[str, float]:
        """Metrics of what the ranks were busy with since the last call, validation and saves included, and of the
        memory that it took; {} while some have not reported. Says who stands out, once."""
        asked = self._asked or self._controller.ask_busy()
        if not self._waits and not asked.is_ready:
            self._asked = asked
            return {}
        self._asked = None if self._waits else self._controller.ask_busy()
        reports = asked.get()
        self._history.append(slow_ranks(reports, self._likeness))
        self._tell(step)
        return busy_metrics(reports) | memory_metrics(reports)

    def _tell(self, step: int) -> None:
        found = list(lasting(self._history))
        for slow, count, ratio in found:
            if slow in self._told:
                continue
            log.warning(
                "rank %d on %s is busy %.1f times as long as its like in %s, in %d of the last %d steps; if that goes "
                "on, leave the node out: sbatch --exclude=%s",
                *(slow.rank, slow.node, ratio, slow.phase, count, len(self._history), slow.node),
            )
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **slow._asdict(), "ratio": round(ratio, 2)}) + "\n")
        self._told = {slow for slow, _, _ in found}

    def _likeness(self, phase: str, rank: int) -> Hashable:
        """Pipeline stages differ in layers, and leaders do more work than the other ranks of their replica."""
        layout = self._controller[phase.split(".")[0]].layout
        coord = layout.coord(rank)
        return coord.pp, rank == layout.leader(coord.dp)
