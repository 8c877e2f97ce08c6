"""The samples of two runs for the same prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpcrl.observe.read.samples import Sample, StepArchive


@dataclass(frozen=True, eq=False)
class PromptPair:
    """A prompt with the samples of two runs in one step. uid: of the first run; without its epoch if they differ."""

    step: int
    uid: str
    data_source: str
    prompt: str
    sides: tuple[list[Sample], list[Sample]]

    @property
    def mean_scores(self) -> tuple[float, float]:
        first, second = (float(np.mean([sample.score for sample in side])) for side in self.sides)
        return first, second


def paired(first: StepArchive, second: StepArchive) -> Iterator[PromptPair]:
    """Yield the common prompts of two archives of a step: by uid, or else by file and row, in another epoch.

    In ascending order of the second run's mean score minus the first run's.
    """
    for with_epoch in (True, False):
        groups = _by_prompt(first, with_epoch), _by_prompt(second, with_epoch)
        common = [uid for uid in groups[0] if uid in groups[1]]
        if common:
            break
    differences = {uid: _mean(second, groups[1][uid]) - _mean(first, groups[0][uid]) for uid in common}
    for uid in sorted(common, key=lambda uid: np.nan_to_num(differences[uid])):
        left, right = [first.sample(row) for row in groups[0][uid]], [second.sample(row) for row in groups[1][uid]]
        yield PromptPair(left[0].step, uid, left[0].data_source, left[0].prompt, (left, right))


def _mean(archive: StepArchive, rows: list[int]) -> float:
    return float(np.mean(archive.columns["score"][rows].astype(np.float64)))


def _by_prompt(archive: StepArchive, with_epoch: bool) -> dict[str, list[int]]:
    """uid -> rows, in the order of sample_index."""
    groups: dict[str, list[int]] = {}
    for row in range(len(archive)):
        uid = str(archive.columns["uid"][row])
        groups.setdefault(uid if with_epoch else uid.rpartition(":")[0], []).append(row)
    if "sample_index" in archive.columns:
        numbers = archive.columns["sample_index"].tolist()
        for rows in groups.values():
            rows.sort(key=numbers.__getitem__)
    return groups
