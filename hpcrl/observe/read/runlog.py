"""Metrics of a run, read back on a login node; runs that differ in their seed only, as one. No torch, no MPI."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from hpcrl.sandbox.foreign_files import ForeignFileError, is_folder, open_file, parse_json, read_end, read_text

TAIL_BYTES = 1 << 17  # about 30 steps
MOST_TAIL = 1 << 25  # a file without rows in this many bytes has none
MOST_BYTES = 1 << 30  # of metrics.jsonl


Named = TypeVar("Named", bound=Any)  # a dataclass with a name


class RunError(ValueError):
    """A folder or file without metrics, or a request for metrics that are not there."""

    user_error = True


@dataclass(frozen=True)
class RunLog:
    name: str
    rows: dict[int, dict[str, float]]  # step -> tag -> value, in order of steps; null is NaN

    def tags(self) -> list[str]:
        """Tags in the order of their first appearance."""
        return list(dict.fromkeys(key for row in self.rows.values() for key in row))

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have `key`."""
        return [(step, row[key]) for step, row in self.rows.items() if key in row]

    def training(self, key: str) -> list[tuple[int, float]]:
        """Its finite values in training steps: step 0 is validation before training."""
        return [(step, value) for step, value in self.series(key) if step > 0 and math.isfinite(value)]

    def phases(self) -> dict[str, dict[int, float]]:
        """Phase -> training step -> seconds, without phases inside phases. The phase `step` contains most others."""
        tags = [tag for tag in self.tags() if re.fullmatch(r"timing_s/[^/]+", tag)]
        seconds = {tag.removeprefix("timing_s/"): dict(self.training(tag)) for tag in tags}
        return {phase: of_steps for phase, of_steps in seconds.items() if of_steps}

    def between(self, start: int | None, stop: int | None) -> RunLog:
        """Steps from `start` to `stop`, both included; None is open."""
        low, high = -math.inf if start is None else start, math.inf if stop is None else stop
        return RunLog(self.name, {step: row for step, row in self.rows.items() if low <= step <= high})


def step_range(text: str) -> tuple[int | None, int | None] | None:
    """First and last step of `A:B`, `A:`, `:B` or one step, None where it is open. None for other texts."""
    match = re.fullmatch(r"(\d+)|(\d*):(\d*)", text)
    if match is None:
        return None
    one, first, last = (int(digits) if digits else None for digits in match.groups())
    return (first, last) if one is None else (one, one)


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunLog]:
    """Read several runs; runs in folders of the same name are named by their paths."""
    paths = list(paths)
    return with_different_names(paths, [read_run(path) for path in paths])


def with_different_names(paths: Iterable[str | os.PathLike[str]], runs: Sequence[Named]) -> list[Named]:
    """The runs, or what else has a name; those of one name are named by their paths."""
    names = [run.name for run in runs]
    return [
        replace(run, name=str(path)) if names.count(run.name) > 1 else run
        for path, run in zip(paths, runs, strict=True)
    ]


def read_run(path: str | os.PathLike[str]) -> RunLog:
    """Read a run directory (`metrics.jsonl`, else TensorBoard event files) or one such file."""
    place = Path(path)
    if not place.exists():
        raise RunError(f"{path}: no such run; expected a run directory or a metrics.jsonl")
    name = place.resolve().name if place.is_dir() else place.resolve().parent.name
    for source in _sources(place):
        try:
            rows = _read_jsonl(source) if source.suffix == ".jsonl" else _read_events(source)
        except ForeignFileError as error:
            raise RunError(str(error)) from None
        if rows:
            return RunLog(name, dict(sorted(rows.items())))
    if place.is_dir() and not any(True for _ in _sources(place)):
        raise RunError(f"{path}: holds neither metrics.jsonl nor TensorBoard event files; is it a run directory?")
    raise RunError(f"{path}: no step has been logged yet, or this is not a log of metrics")


def last_rows(path: str | os.PathLike[str], count: int) -> dict[int, dict[str, float]]:
    """The rows of at least the last `count` steps of a run, in order of steps; {} if it has logged none.

    Reads only the end of a long metrics.jsonl; other runs are read whole.
    """
    file = Path(path) / "metrics.jsonl"
    if not file.exists():
        try:
            return read_run(path).rows
        except RunError:
            return {}
    length = TAIL_BYTES
    while True:
        try:
            size = file.stat().st_size
            rows = _rows(read_end(file, length))
        except OSError:
            return {}
        if len(rows) >= count or length >= min(size, MOST_TAIL):
            return dict(sorted(rows.items()))
        length *= 4


def _sources(place: Path) -> Iterable[Path]:
    if place.is_file():
        yield place
    elif place.is_dir():
        if (place / "metrics.jsonl").exists():
            yield place / "metrics.jsonl"
        for folder in (place / "tensorboard", place):
            if is_folder(folder, place) and any(folder.glob("*tfevents*")):
                yield folder


def _read_jsonl(path: Path) -> dict[int, dict[str, float]]:
    return _rows(read_text(path, most=MOST_BYTES, errors="replace"))


def _rows(text: str) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in text.splitlines():
        # The last line of a running or a killed run may be torn, and the first one of a file's end.
        try:
            record = parse_json(line)
            step = record.pop("step")
            values = {key: math.nan if value is None else float(value) for key, value in record.items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        if isinstance(step, int):
            rows[step] = values
    return rows


def _read_events(path: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in path.glob("*tfevents*") if path.is_dir() else (path,):
        open_file(file, path.parent).close()  # the package opens it by its name
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return rows


# Keys shown by default, in this order, under verl's names.
USUAL_KEYS = (
    r"critic/score/mean",
    r"critic/rewards/mean",
    r"val-core/.*",
    r"(train|val|sft)/.*",
    r"rewards/(accuracies|margins)",
    r"actor/(pg_loss|ppo_kl|kl_loss|reward_kl_penalty|entropy|pg_clipfrac|grad_norm)",
    r"critic/(vf_loss|vf_explained_var|grad_norm)",
    r"response_length/(mean|clip_ratio)",
    r"training/(rollout_probs_diff_(max|mean)|rollout_actor_probs_pearson_corr)",
    r"perf/(throughput|time_per_step)",
    r"timing_s/[^/]+",
)


def choose_keys(runs: Iterable[RunLog], pattern: str | None) -> list[str]:
    """Return tags that match `pattern` anywhere (None: the usual ones, else all), in order."""
    known = list(dict.fromkeys(key for run in runs for key in run.tags()))
    if pattern is None:
        usual = [key for usual_key in USUAL_KEYS for key in sorted(known) if re.fullmatch(usual_key, key)]
        return list(dict.fromkeys(usual)) or known
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise RunError(f"--keys {pattern!r} is not a regular expression: {error}") from None
    chosen = [key for key in known if expression.search(key)]
    if not chosen:
        raise RunError(f"--keys {pattern!r} matches none of {len(known)} keys, e.g. {', '.join(sorted(known)[:5])}")
    return chosen


@dataclass(frozen=True)
class SeedMean(RunLog):
    """The mean of runs that differ in their seed, of the steps and tags that all of them have."""

    deviations: dict[int, dict[str, float]]  # standard deviations of the same

    def band(self, key: str) -> list[float]:
        """Standard deviation at each point of `series(key)`."""
        return [row[key] for row in self.deviations.values() if key in row]


def without_seed_number(name: str) -> str:
    """The name of a run without the number at its end: grpo_3 -> grpo."""
    return re.sub(r"_?\d+$", "", name) or name


def over_seeds(runs: Sequence[RunLog]) -> list[RunLog]:
    """Runs whose names differ in the number at their end only, as one."""
    groups: dict[str, list[RunLog]] = {}
    for run in runs:
        groups.setdefault(without_seed_number(run.name), []).append(run)
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
