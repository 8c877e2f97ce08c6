"""Runs that differ in their seed only, as one: their mean and its deviation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcrl.observe.read.runlog import RunLog


@dataclass(frozen=True)
class SeedMean(RunLog):
    """The mean of runs that differ in their seed, of the steps and tags that all of them have."""

    deviations: dict[int, dict[str, float]]  # standard deviations of the same

    def band(self, key: str) -> list[float]:
        """Standard deviation at each point of `series(key)`."""
        return [row[key] for row in self.deviations.values() if key in row]


def stem(name: str) -> str:
    """The name of a run without the number at its end: grpo_3 -> grpo."""
    return re.sub(r"_?\d+$", "", name) or name


def over_seeds(runs: Sequence[RunLog]) -> list[RunLog]:
    """Runs whose names differ in the number at their end only, as one."""
    groups: dict[str, list[RunLog]] = {}
    for run in runs:
        groups.setdefault(stem(run.name), []).append(run)
    return [seed_mean(name, group) for name, group in groups.items()]


def seed_mean(name: str, runs: Sequence[RunLog]) -> SeedMean:
    means: dict[int, dict[str, float]] = {}
    deviations: dict[int, dict[str, float]] = {}
    for step, row in runs[0].rows.items():
        rows = [run.rows.get(step, {}) for run in runs]
        values = {tag: [other[tag] for other in rows] for tag in row if all(tag in other for other in rows)}
        means[step] = {tag: fmean(found) for tag, found in values.items()}
        deviations[step] = {tag: _deviation(found, means[step][tag]) for tag, found in values.items()}
    return SeedMean(name, means, deviations)


def _deviation(values: Sequence[float], mean: float) -> float:
    """Of the population, as statistics.pstdev, which computes with fractions and takes a hundred times as long."""
    return math.sqrt(fmean((value - mean) ** 2 for value in values))
