"""Whether a step that was run again gives the numbers that the run logged and archived. No torch, no MPI."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path

# Metrics of how long and how large, which no two runs share, and which samples a replica had.
OF_A_MACHINE = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/", "global_seqlen/", "fully_async/")
# Metrics of generation and of validation, which a step on recorded samples does not repeat.
OF_GENERATION = (
    *("val-core/", "val-aux/", "val/", "tools/", "env/", "training/num_turns/", "training/num_sequences/"),
    *("tool_call_counts/", "training/off_policy/", "training/filter_groups/", "train/num_gen_batches"),
    *("reward/timeouts", "reward/crashes", "reward/errors", "reward/over_limits", "reward/judge/"),
)
SET = re.compile(r"(.*/)?(lr|kl_coef|reward_kl_penalty_coeff|epoch|global_step|skipped_updates)")  # not sums of terms
COPIED = ("input_ids", "response_mask", "rollout_log_probs")  # columns that are read from the recording


class Difference(NamedTuple):
    """A number of the run and what the step gave. `what` names it; None: it is not there. floor: see `distances`."""

    what: str
    logged: float | None
    replayed: float | None
    floor: float = 1.0

    @property
    def size(self) -> float:
        if self.logged is None or self.replayed is None:
            return math.inf
        return float(distances(np.array([self.logged]), np.array([self.replayed]), self.floor)[0])

    def __str__(self) -> str:
        logged, replayed = ("nothing" if value is None else repr(value) for value in (self.logged, self.replayed))
        return f"{self.what}: the run has {logged}, the replay {replayed}"


@dataclass
class Agreement:
    """Counts of numbers that are equal bit for bit, equal within `rtol`, and different.

    Two numbers a and b agree within rtol if |a - b| <= rtol * max(1, |a|, |b|), because many metrics are sums of terms
    of size 1 that cancel each other; those that are set, such as learning rates, if |a - b| <= rtol * max(|a|, |b|).
    """

    step: int
    rtol: float
    num_metrics: int = 0
    num_columns: int = 0
    num_equal: int = 0
    num_different: int = 0
    first: Difference | None = None  # that does not agree
    largest: Difference | None = None  # of those within rtol

    @property
    def agrees(self) -> bool:
        return self.num_different == 0

    @property
    def is_bitwise(self) -> bool:
        return self.num_equal == self.num_metrics + self.num_columns

    def add(self, worst: Difference, first: Difference | None = None) -> None:
        """Count a number; or a column, by its largest difference and its first one that is too large."""
        if worst.size == 0:
            self.num_equal += 1
        elif worst.size > self.rtol:
            self.num_different += 1
            self.first = self.first or first or worst
        elif self.largest is None or worst.size > self.largest.size:
            self.largest = worst

    def __str__(self) -> str:
        compared = f"{self.num_metrics} metrics" + f" and {self.num_columns} columns" * (self.num_columns > 0)
        if self.is_bitwise:
            return f"step {self.step}: {compared} agree bit for bit"
        if self.agrees:
            return (
                f"step {self.step}: {compared} agree within {self.rtol:g}, {self.num_equal} of them bit for bit; the "
                f"largest difference is in {self.largest}"
            )
        return (
            f"step {self.step}: {self.num_different} of {compared} differ by more than {self.rtol:g}; the first is "
            f"{self.first}"
        )


def compare_metrics(logged: Mapping[str, float], replayed: Mapping[str, float], agreement: Agreement) -> None:
    """Add the metrics that the run logged, in its order; those that only the replay has are of another version."""
    for name in logged:
        if not name.startswith((*OF_A_MACHINE, *OF_GENERATION)):
            agreement.num_metrics += 1
            floor = 0.0 if SET.fullmatch(name) else 1.0
            agreement.add(Difference(name, logged.get(name), replayed.get(name), floor))


def compare_archives(logged: Path, replayed: Path, agreement: Agreement) -> None:
    """Add the columns of a step that the update computed. Both are rollout folders. Raises ArchiveError."""
    expected, samples, _ = read_step(step_path(logged, agreement.step))
    columns, _, _ = read_step(step_path(replayed, agreement.step))
    names = [f"{uid} #{index}" for uid, index in zip(samples["uid"], samples["sample_index"], strict=True)]
    for name, (values, offsets) in expected.items():
        if name in COPIED:
            continue
        agreement.num_columns += 1
        if name not in columns or not np.array_equal(columns[name][1], offsets):
            agreement.add(Difference(f"the number of entries of {name}", float(len(values)), None))
        elif len(values):
            _compare_column(name, expected[name], columns[name][0], names, agreement)
        else:
            agreement.num_equal += 1


def _compare_column(
    name: str, expected: tuple[np.ndarray, np.ndarray], values: np.ndarray, samples: list[str], agreement: Agreement
) -> None:
    """Add a column, as its largest difference and the first one that is too large."""

    def at(place: int) -> Difference:
        row = int(np.searchsorted(expected[1], place, side="right")) - 1
        what = f"{name} of sample {samples[row]}, token {place - int(expected[1][row])}"
        return Difference(what, *(float(str(column[place])) for column in (expected[0], values)))  # fp32, in its digits

    sizes = distances(expected[0], values)
    too_large = np.flatnonzero(sizes > agreement.rtol)
    agreement.add(at(int(sizes.argmax())), at(int(too_large[0])) if len(too_large) else None)


def distances(a: np.ndarray, b: np.ndarray, floor: float = 1.0) -> np.ndarray:
    """|a - b| / max(floor, |a|, |b|) of each pair, float64: 0 for equal numbers and two NaN, infinity if one is not
    finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.abs(a - b) / np.maximum(floor, np.maximum(np.abs(a), np.abs(b)))
    found[np.isnan(found)] = np.inf
    found[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return found
