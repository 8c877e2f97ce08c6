"""The charts of the page: which metrics share a panel, the values of their curves, and busy seconds of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpcrl.observe.read.recorded_run import RecordedRun
from hpcrl.observe.read.runlog import RunLog, SeedMean, seed_mean, without_seed_number
from hpcrl.observe.record.archive import read_records
from hpcrl.observe.trace.records import TraceError, decode, trace_paths

Item = TypeVar("Item")

MOST_POINTS, POINTS_IN_ALL = 2000, 7000  # of one curve, of all; of longer runs, evenly spaced steps are shown
FEWEST_POINTS = 100
MOST_KEYS = 6  # curves of one panel and run
MOST_PHASES = 10  # of the stacked areas; the others are added up
DIGITS = 7  # significant ones of the values in the page

NAMING = ("run.name", "run.dir", "run.seed")  # keys in which runs of one configuration differ
AROUND_STEPS = ("testing", "save_checkpoint")  # phases that timing_s/step does not include


class Panel(NamedTuple):
    """keys: regular expressions of whole tags; the first `any_of` that match decide, where that is set. unit: of the
    values. section: learning or time."""

    section: str
    title: str
    unit: str
    keys: tuple[str, ...]
    any_of: bool = False


PANELS = (
    Panel("learning", "Reward", "", (r"critic/score/mean", r"critic/rewards/mean", r"objective/scores_margin")),
    Panel(
        "learning",
        "Accuracy",
        "share",
        (
            r"val-core/.*/acc/mean@\d+",
            r"val-core/.*/mean@\d+",
            r"(train|val)/(accuracy|mean_token_accuracy)|rewards/accuracies",
        ),
        any_of=True,
    ),
    Panel("learning", "Loss", "", (r"(train|val|sft)/loss", r"actor/pg_loss", r"critic/vf_loss")),
    Panel("learning", "Response length", "tokens", (r"response_length/(mean|max)",)),
    Panel("learning", "At the limit, aborted", "share", (r"response_length/clip_ratio", r"response/aborted_ratio")),
    Panel("learning", "KL", "nats", (r"actor/(ppo_kl|kl_loss|reward_kl_penalty)", r"kl|val/kl", r"rollout_corr/kl")),
    Panel("learning", "Entropy", "nats", (r"actor/entropy",)),
    Panel("learning", "Clip fraction", "share", (r"actor/pg_clipfrac(_lower)?", r"critic/vf_clipfrac")),
    Panel("learning", "Gradient norm", "", (r"(actor|critic|reward|train)/grad_norm",)),
    Panel("learning", "Log-prob gap: rollout - training", "nats", (r"training/rollout_log_probs_diff_(mean|max)",)),
    Panel("learning", "Probability gap: rollout - training", "", (r"training/rollout_probs_diff_(mean|max)",)),
    Panel("learning", "Staleness", "weight versions", (r"training/off_policy/trajectory_staleness/.*",)),
    Panel("learning", "Preference margin", "nats", (r"rewards/(margins|chosen|rejected)",)),
    Panel(
        "learning",
        "Failed scores and turns",
        "",
        (r"(reward|env)/(timeouts|crashes|errors|over_limits)", r"reward/judge/unparsed_ratio"),
    ),
    Panel("time", "Tokens per second and rank", "tokens/s", (r"perf/throughput",)),
    Panel("time", "Time per step", "s", (r"perf/time_per_step", r"perf/predicted_s/step")),
    Panel("time", "MFU", "share", (r"perf/mfu/.*",)),
    Panel("time", "Memory of devices", "GiB", (r"perf/max_memory_(allocated|reserved)_gb",)),
    Panel("time", "Memory of hosts", "GiB", (r"perf/cpu_memory_used_gb", r"memory/host_buffers_gb")),
    Panel("time", "Refit", "s", (r"perf/refit/(seconds|checksum_seconds)", r"timing_s/update_weights")),
    Panel("time", "Saves", "s", (r"perf/save_seconds", r"timing_s/save_checkpoint")),
    Panel("time", "Idle", "share of the step", (r"fully_async/(trainer|rollouter)/idle_ratio",)),
)


def number(value: float | None) -> float | int | None:
    """For JSON: DIGITS significant digits; null for what is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in sorted({round(index * (len(items) - 1) / (most - 1)) for index in range(most)})]


def group_seeds(runs: Sequence[RecordedRun], by_name: bool = False) -> list[tuple[str, list[int]]]:
    """(name, numbers of the runs) of each curve. Runs are one curve if their configs differ in nothing but NAMING;
    `by_name`, and of runs without a config, if their names differ in the number at their end only."""
    groups: dict[Any, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: str(value) for key, value in run.config.items() if key not in NAMING}
        key = without_seed_number(run.name) if by_name or not config else frozenset(config.items())
        groups.setdefault(key, []).append(index)
    names = [runs[members[0]].name if len(members) == 1 else _shared(runs, members) for members in groups.values()]
    return [
        (name if names.count(name) == 1 else runs[members[0]].name, members)
        for name, members in zip(names, groups.values(), strict=True)
    ]


def _shared(runs: Sequence[RecordedRun], members: Sequence[int]) -> str:
    stems = list(dict.fromkeys(without_seed_number(runs[index].name) for index in members))
    return f"{' + '.join(stems[:3])} ({len(members)} seeds)"


def points_of(count: int) -> int:
    """How many points each of `count` curves may have."""
    return max(min(POINTS_IN_ALL // max(count, 1), MOST_POINTS), FEWEST_POINTS)


def panels_of(logs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """The panels for which one of the runs has values."""
    tags = sorted({tag for log in logs for tag in log.tags()})
    panels = []
    for panel in PANELS:
        matches = [[tag for tag in tags if re.fullmatch(pattern, tag)] for pattern in panel.keys]
        if panel.any_of:
            matches = [tags_of_one for tags_of_one in matches if tags_of_one][:1]
        keys = list(dict.fromkeys(tag for tags_of_one in matches for tag in tags_of_one))
        if keys:
            shown = {"keys": keys[:MOST_KEYS], "left_out": keys[MOST_KEYS:], "anchor": anchor(panel.title)}
            panels.append(panel._asdict() | shown | {"is_flat": is_flat(logs, keys[:MOST_KEYS])})
    return panels


def is_flat(logs: Sequence[RunLog], keys: Sequence[str]) -> bool:
    """Whether each curve of several values has the same one in all steps. NaN is not flat."""
    values = [[value for _, value in log.series(key)] for log in logs for key in keys]
    return any(len(curve) > 1 for curve in values) and all(len(set(curve)) < 2 for curve in values)


def anchor(title: str) -> str:
    """The id of a chart in the page."""
    return "chart-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def curves_of(
    runs: Sequence[RecordedRun], groups: Sequence[tuple[str, list[int]]], keys: Iterable[str]
) -> list[dict[str, Any]]:
    """The values of each curve at its steps; of several seeds, the mean and the standard deviation."""
    wanted = list(dict.fromkeys(keys))
    points = points_of(len(groups))
    return [_curve(name, members, [runs[index].log for index in members], wanted, points) for name, members in groups]


def _curve(name: str, members: list[int], logs: Sequence[RunLog], keys: Sequence[str], points: int) -> dict[str, Any]:
    logs = [RunLog(log.name, {step: _only(row, keys) for step, row in log.rows.items()}) for log in logs]
    log = logs[0] if len(logs) == 1 else seed_mean(name, logs)
    steps = [step for step, row in log.rows.items() if row]
    chosen = evenly_spaced(steps, points)
    values = {key: [number(log.rows[step].get(key)) for step in chosen] for key in keys}
    values = {key: series for key, series in values.items() if any(value is not None for value in series)}
    curve: dict[str, Any] = {"name": name, "runs": members, "steps": chosen, "num_steps": len(steps), "values": values}
    if isinstance(log, SeedMean):
        curve["band"] = {key: [number(log.deviations[step].get(key)) for step in chosen] for key in values}
    return curve


def _only(row: Mapping[str, float], keys: Sequence[str]) -> dict[str, float]:
    return {key: row[key] for key in keys if key in row}


def phases_of(log: RunLog, points: int = MOST_POINTS) -> dict[str, Any]:
    """Seconds per phase of the training steps: the phases that take most, then all others and the rest of the step."""
    steps = [step for step, _ in log.series("timing_s/step") if step > 0]
    phases = {phase: seconds for phase, seconds in log.phases().items() if seconds.keys() & steps}
    wholes = phases.pop("step", {})
    totals = {phase: sum(seconds.get(step, 0.0) for step in steps) for phase, seconds in phases.items()}
    ordered = sorted(totals, key=lambda phase: -totals[phase])
    named = ordered if len(ordered) <= MOST_PHASES else ordered[: MOST_PHASES - 1]
    chosen = evenly_spaced(steps, points)
    rows = [{phase: phases[phase].get(step, 0.0) for phase in ordered} for step in chosen]
    seconds = {phase: [number(row[phase]) for row in rows] for phase in named}
    if others := ordered[len(named) :]:
        seconds["other phases"] = [number(sum(row[phase] for phase in others)) for row in rows]
    if chosen:
        inside = [sum(value for phase, value in row.items() if phase not in AROUND_STEPS) for row in rows]
        seconds["rest of the step"] = [
            number(max(wholes.get(step, 0.0) - within, 0.0)) for step, within in zip(chosen, inside, strict=True)
        ]
    return {"steps": chosen, "seconds": seconds}


def busy_of(log: RunLog, points: int = MOST_POINTS) -> dict[str, Any]:
    """Busy seconds of the ranks by phase: the least busy, the median and the busiest rank of each step."""
    prefix, ends = "perf/busy_s/", ("min", "median", "max")
    tags = [tag for tag in log.tags() if tag.startswith(prefix) and tag.endswith("/max")]
    names = [tag.removeprefix(prefix).removesuffix("/max") for tag in tags]
    steps = [step for step, row in log.rows.items() if any(tag in row for tag in tags)]
    chosen = evenly_spaced(steps, points // 2)
    phases = {
        name: {end: [number(log.rows[step].get(f"{prefix}{name}/{end}")) for step in chosen] for end in ends}
        for name in names
    }
    totals = {name: sum(value or 0 for value in ends_of["max"]) for name, ends_of in phases.items()}
    ordered = sorted(phases, key=lambda name: -totals[name])
    return {"steps": chosen, "phases": {name: phases[name] for name in ordered}}


MOST_RANKS = 64  # rows of the heat map: evenly spaced ranks, and those that were reported as slow
MOST_TRACE_BYTES = 256 * 2**20  # of the files that are read


@dataclass
class RankTimes:
    """busy: step -> seconds between the end of the step before and that of the step, without those in which the rank
    waited for other ranks inside MPI."""

    rank: int
    node: str
    busy: dict[int, float] = field(default_factory=dict)


def rank_times(run: Path, slow: Sequence[int], notes: list[str]) -> list[RankTimes]:
    """The times of the ranks, in their order; [] for a run without traces.

    Args:
        slow: ranks that must be among them.
    """
    paths = trace_paths(run)
    ranks = list(paths)
    chosen = {*evenly_spaced(ranks, MOST_RANKS)} | (set(slow) & set(ranks))
    if len(chosen) < len(ranks):
        notes.append(f"busy time: {len(chosen)} of {len(ranks)} ranks are shown")
    of_ranks: list[RankTimes] = []
    bytes_to_read = MOST_TRACE_BYTES
    for rank in sorted(chosen, key=lambda rank: (rank not in slow, rank)):
        bytes_to_read -= paths[rank].lstat().st_size
        if bytes_to_read < 0:
            notes.append(f"busy time: traces of {len(chosen) - len(of_ranks)} ranks are not read, which are too large")
            break
        times = _read_rank(rank, paths[rank], run, notes)
        if times.busy:
            of_ranks.append(times)
    return sorted(of_ranks, key=lambda times: times.rank)


def _read_rank(rank: int, path: Path, run: Path, notes: list[str]) -> RankTimes:
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
