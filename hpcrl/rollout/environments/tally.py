"""Counts of what answers the model, its own numbers, and warnings of its failures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrl.algorithms.metrics import Mean, Metric, Sum

log = logging.getLogger(__name__)

MAX_WARNINGS = 3  # log lines of a job per kind of failure; metrics count all of them


@dataclass
class Tally:
    """section: of metrics. names: counts that are metrics also if they are 0. warned: failures by kind, also of earlier
    generations."""

    section: str
    names: Sequence[str]
    warned: Counter[str]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _values: dict[str, list[float]] = field(default_factory=dict, init=False)

    def note(self, name: str, value: float) -> None:
        """Add a value to those of which the metric is the mean."""
        self._values.setdefault(name, []).append(value)

    def fail(self, kind: str, line: str) -> None:
        """Count a failure, and log the line if it is one of the first of this kind."""
        self.counts[kind] += 1
        self.warned[kind] += 1
        if self.warned[kind] <= MAX_WARNINGS:
            log.warning("%s", line)

    def metrics(self) -> dict[str, Metric]:
        """Return the counts and means since the last call."""
        found: dict[str, Metric] = {f"{self.section}/{name}": Sum(float(self.counts[name])) for name in self.names}
        for name, values in self._values.items():
            found[f"{self.section}/{name}/mean"] = Mean(sum(values), float(len(values)))
        self.counts.clear()
        self._values.clear()
        return found
