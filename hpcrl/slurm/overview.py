"""Several runs, a line each: step, ETA, reward and its trend, slice, wall time left, last warning.

From their files, and one call of squeue.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrl.observe.read.logs import LEVELS, read_log
from hpcrl.observe.record.progress import duration
from hpcrl.runtime.exits import InputError
from hpcrl.slurm import chain
from hpcrl.slurm.status import (
    Progress,
    Queued,
    aligned,
    check_is_run,
    read_progress,
    read_queue,
    states_of,
    step_and_eta,
    summary,
)
from hpcrl.slurm.template import INSIDE_RUN

# What a job improves, by its metric, and how it is called in the table; the first one that a run has.
REWARDS = {
    "critic/score/mean": "",
    "critic/rewards/mean": "",
    "rewards/accuracies": "accuracy ",
    "preference/accuracy": "accuracy ",
    "train/loss": "loss ",
}
STEPS_OF_TREND = 10
LOG_BYTES = 1 << 18  # of the end of rank 0's log, in which the last warning is searched
HEADER = ["run", "state", "step", "ETA", "reward", "trend", "slice", "left", "last warning"]


def runs_in(folder: Path) -> list[Path]:
    """The runs directly below a folder, by name; [] if it is itself a run's folder. Raises InputError if it is
    neither."""
    if (folder / chain.CHAIN_FILE).exists():
        return []
    try:
        check_is_run(folder)
    except InputError:
        runs = [path for path in sorted(folder.iterdir()) if _is_run(path)] if folder.is_dir() else []
        if not runs:
            raise
        return runs
    return []


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("config.yaml", chain.CHAIN_FILE, "metrics.jsonl"))


def overview(runs: Sequence[Path]) -> str:
    """The table, for the width of the terminal; whole lines where stdout is none."""
    found = {run: read_progress(run) for run in dict.fromkeys(runs)}
    jobs = {run: _jobs_of(run, progress) for run, progress in found.items()}
    queue = read_queue(sorted({job for of_run in jobs.values() for job in of_run}))
    queued = {run: next((queue[job] for job in jobs[run] if job in queue), None) if queue else None for run in found}
    names = Counter(run.resolve().name for run in found)
    table = [HEADER]
    states = states_of([(run, queued[run], progress) for run, progress in found.items()])
    for (run, progress), (state, note) in zip(found.items(), states, strict=True):
        name = run.resolve().name
        table.append(_line(str(run) if names[name] > 1 else name, run, progress, queued[run], state, note))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join([*aligned(table, width), "", summary([state for state, _ in states], queue)])


def _jobs_of(run: Path, progress: Progress) -> list[str]:
    """Slurm's ids of the run's job: of the one that was submitted, and of the last slice."""
    found = []
    for link in chain.read(run) or ():
        if link.job and link.command not in INSIDE_RUN:
            places = [number for number, folder in enumerate(link.runs) if Path(folder).name == run.resolve().name]
            found += [link.job_of(number) for number in places[:1]]
    return [*found, *([progress.job] if progress.job is not None else [])]


def _line(name: str, run: Path, progress: Progress, queued: Queued | None, state: str, note: str) -> list[str]:
    step, eta = step_and_eta(progress, state)
    reward, change = last_and_trend(progress.rows)
    slices = str(progress.slices) if progress.slices else "-"
    warning = last_warning(run) if state != "failed" else note
    return [name, state, step, eta, reward, change, slices, _left(queued, progress, state), warning or "-"]


def last_and_trend(rows: Mapping[int, Mapping[str, float]]) -> tuple[str, str]:
    """The last reward, and how much it has changed over the last STEPS_OF_TREND steps, by a line fitted to them."""
    for key, label in REWARDS.items():
        points = [(step, row[key]) for step, row in rows.items() if step > 0 and math.isfinite(row.get(key, math.nan))]
        if points:
            last = points[-STEPS_OF_TREND:]
            return f"{label}{last[-1][1]:.4g}", "-" if len(last) < 2 else f"{_fitted_change(last):+.2g}"
    return "-", "-"


def _fitted_change(points: Sequence[tuple[int, float]]) -> float:
    """Slope of the least-squares line, times the steps from the first point to the last."""
    mean_step = sum(step for step, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((step - mean_step) ** 2 for step, _ in points)
    slope = sum((step - mean_step) * (value - mean) for step, value in points) / spread
    return slope * (points[-1][0] - points[0][0])


def _left(queued: Queued | None, progress: Progress, state: str) -> str:
    """Wall time that is left to the slice: squeue's, or by the end of the allocation that the run has noted."""
    if state != "running":
        return "-"
    if queued is not None and queued.left and queued.left[0].isdigit():
        return queued.left
    return "-" if progress.ends_at is None else duration(max(progress.ends_at - time.time(), 0.0))


def last_warning(run: Path) -> str:
    """Time and first line of the last warning or error of hpcrl in rank 0's log; "" if there is none in its end."""
    try:
        lines = list(read_log(0, run / "logs" / "rank_00000.log", run, LOG_BYTES))
    except OSError:
        return ""
    for line in reversed(lines):
        if line.level in LEVELS and line.logger.startswith("hpcrl"):
            first, *_ = line.text.split("\n", 1)
            return f"{line.time[11:16]} {first}"
    return ""
