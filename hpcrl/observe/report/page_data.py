"""What the page shows, as values for JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpcrl.observe.read.rank_logs import WarningGroup, shorten
from hpcrl.observe.read.recorded_run import RecordedRun
from hpcrl.observe.record.progress import duration
from hpcrl.observe.report.charts import (
    busy_of,
    curves_of,
    evenly_spaced,
    group_seeds,
    number,
    panels_of,
    phases_of,
    points_of,
)
from hpcrl.observe.report.rank_times import RankTimes, rank_times
from hpcrl.observe.report.sample_choice import SampleChoice

ROOM_FOR_SAMPLES = 4_500_000  # bytes of the page, of all runs together
MOST_WARNINGS, LONGEST_WARNING = 100, 1000  # groups of one run
MOST_ATTEMPTS = 500  # the last ones
LONGEST_VALUE = 300  # characters of a config value
MOST_RANK_STEPS = 300  # columns of the heat map of ranks

HEADLINES = ("critic/score/mean", "train/accuracy", "rewards/accuracies", "train/loss")  # the first that a run has


def page_data(runs: Sequence[RecordedRun], *, by_name: bool = False) -> dict[str, Any]:
    groups = group_seeds(runs, by_name)
    panels = panels_of([run.log for run in runs])
    keys = [key for panel in panels for key in panel["keys"]]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "panels": panels,
        "curves": curves_of(runs, groups, keys),
        "runs": [_run(run, ROOM_FOR_SAMPLES // len(runs), points_of(len(runs))) for run in runs],
        "config": config_table(runs),
    }


def _run(run: RecordedRun, room: int, points: int) -> dict[str, Any]:
    choice = SampleChoice(run.folder, room)
    samples = choice.data()
    notes = [*run.notes, *choice.notes]
    ranks = rank_times(run.folder, [straggler.rank for straggler in run.stragglers], notes)
    story = run.attempts[-MOST_ATTEMPTS:]
    if len(story) < len(run.attempts):
        notes.append(f"slices: the last {MOST_ATTEMPTS} of {len(run.attempts)} are shown")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "summary": _summary(run),
        "phases": phases_of(run.log, points),
        "busy": busy_of(run.log, points),
        "ranks": _rank_rows(ranks),
        "stragglers": [asdict(straggler) for straggler in run.stragglers[-1000:]],
        "attempts": [asdict(attempt) for attempt in story],
        "warnings": [_warning(group) for group in run.warnings[:MOST_WARNINGS]],
        "num_warnings": len(run.warnings),
        "hangs": run.hangs,
        "checkpoints": [asdict(saved) | {"gib": number(saved.gib)} for saved in run.checkpoints],
        "samples": samples,
        "notes": notes,
    }


def _rank_rows(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """Busy seconds by rank, in the steps that any of the ranks recorded."""
    recorded = sorted({step for times in ranks for step in times.busy})
    steps = [recorded[index] for index in evenly_spaced(len(recorded), MOST_RANK_STEPS)]
    rows = [
        {"rank": times.rank, "node": times.node, "seconds": [number(times.busy.get(step)) for step in steps]}
        for times in ranks
    ]
    return {"steps": steps, "rows": rows}


def _summary(run: RecordedRun) -> dict[str, Any]:
    """The row of the run in the table at the top."""
    rows = [row for step, row in run.log.rows.items() if step > 0]
    steps = list(run.log.rows)
    headline = next((key for key in HEADLINES if any(key in row for row in rows)), None)
    values = [row[headline] for row in rows if headline in row] if headline else []
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    speeds = [row["perf/throughput"] for row in rows if "perf/throughput" in row]
    return {
        "step": steps[-1] if steps else None,
        "total": run.total_steps,
        "attempts": len(run.attempts),
        "lost": sum(attempt.lost_steps or 0 for attempt in run.attempts),
        "headline": headline,
        "first": number(values[0]) if values else None,
        "last": number(values[-1]) if values else None,
        "best": number(max(values)) if values else None,
        "time": duration(sum(value for value in seconds if value == value)) if seconds else None,
        "seconds_per_step": number(sum(seconds) / len(seconds)) if seconds else None,
        "throughput": number(speeds[-1]) if speeds else None,
        "ranks": next((attempt.ranks for attempt in reversed(run.attempts) if attempt.ranks), None),
        "nodes": next((attempt.nodes for attempt in reversed(run.attempts) if attempt.nodes), ""),
    }


def _warning(group: WarningGroup) -> dict[str, Any]:
    return {
        "level": group.level,
        "logger": group.logger,
        "text": shorten(group.text, LONGEST_WARNING),
        "count": group.count,
        "ranks": spans(sorted(group.ranks)),
        "first": group.first,
        "last": group.last,
    }


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5"""
    found: list[list[int]] = []
    for one in numbers:
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def config_table(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Each key but the run's name with its value in each run, None where a run does not have it; differing ones are
    marked."""
    keys = sorted({key for run in runs for key in run.config} - {"run.name", "run.dir"})
    rows = []
    for key in keys:
        values = [_text(run.config[key]) if key in run.config else None for run in runs]
        differs = len(set(values)) > 1
        rows.append({"key": key, "values": values if differs else values[:1], "differs": differs})
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(str(value), LONGEST_VALUE)
