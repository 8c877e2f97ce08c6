"""Summary of a run: the change of its validation metrics, and the time of its phases.

`python -m hpcrl.observe.report.summary RUN [--sft RUN]`
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from hpcrl.observe.read.runlog import RunError, RunLog, read_run
from hpcrl.observe.record.progress import duration, validation_means
from hpcrl.observe.report.scalars import Table, layout, number
from hpcrl.sandbox.foreign_files import printable, take_any_text

VALIDATION = "val-core/"


def main(arguments: Sequence[str] | None = None) -> int:
    take_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.observe.report.summary",
        description="Summarise a run: validation metrics and time per phase.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory or metrics.jsonl")
    parser.add_argument("--sft", metavar="RUN", help="the supervised run that this run started from")
    options = parser.parse_args(arguments)
    try:
        warm_start = read_run(options.sft) if options.sft else None
        print(printable(report(read_run(options.run), warm_start)))
    except RunError as error:
        print(printable(f"summary: error: {error}"), file=sys.stderr)
        return 2
    return 0


def report(run: RunLog, warm_start: RunLog | None = None) -> str:
    parts = [] if warm_start is None else [_heading("warm start", warm_start)]
    parts.append(_heading("training", run))
    for table in (validation_table(run), phase_table(run)):
        if len(table) > 1:
            parts.append(layout(table))
    speed = tokens_per_second(run)
    if speed is not None:
        parts.append(f"tokens/s  {speed:,.0f}")
    return "\n\n".join(parts)


def _heading(label: str, run: RunLog) -> str:
    steps = [step for step in run.rows if step > 0]
    seconds = sum(value for _, value in _training(run, "timing_s/step"))
    took = f", {duration(seconds)} ({seconds / len(steps):.3g} s/step)" if seconds and steps else ""
    return f"{label}: {run.name}, {len(steps)} steps{took}"


def validation_table(run: RunLog) -> Table:
    """First and last value of every validation metric; accuracies in percent."""
    table = [["validation", "before", "after", "change", "best", "at step"]]
    for key in sorted(run.tags()):
        series = [(step, value) for step, value in run.series(key) if not math.isnan(value)]
        if not key.startswith(VALIDATION) or not series or key.endswith("/std"):
            continue
        best_step, best = max(series, key=lambda point: point[1])
        before, after = series[0][1], series[-1][1]
        show, sign = ("{:.1%}".format, _percentage_points) if "/acc/" in key else (number, "{:+.4g}".format)
        table.append(
            [key.removeprefix(VALIDATION), show(before), show(after), sign(after - before), show(best), str(best_step)]
        )
    return table


def at_end(run: RunLog, folder: Path, commands: Mapping[str, str]) -> str:
    """Steps, time, first and last validation, the folder and the commands, for the log of a run that has ended."""
    lines = [_heading("done", run)]
    for metric, sources in validation_means(dict.fromkeys(run.tags(), 0.0)).items():
        for source in sources:
            series = run.series(f"{VALIDATION}{source}/{metric}")
            points = dict.fromkeys((series[0], series[-1]))
            values = ", ".join(f"{value:.3f} at step {step}" for step, value in points)
            lines.append(f"{source} {metric}: {values}")
    lines += [f"{f'{name}:':<9} {text}" for name, text in {"folder": folder, **commands}.items()]
    return "\n  ".join(lines)


def next_commands(folder: Path, launcher: str, *, evaluates: bool, exports: bool) -> dict[str, str]:
    """What to run next on a run's folder, for a shell. launcher: how ranks are started."""
    run, on_ranks = quote(str(folder)), f"{launcher} python -m hpcrl".strip()
    commands = {"report": f"python -m hpcrl report {run} --out {quote(str(folder / 'report.html'))}"}
    if evaluates:
        commands["evaluate"] = f"{on_ranks} evaluate {quote(str(folder / 'config.yaml'))} model.init_from={run}"
    if exports:
        commands["export"] = f"{on_ranks} convert {run} {quote(str(folder / 'huggingface'))}"
    return commands


def _percentage_points(value: float) -> str:
    return f"{100 * value:+.1f}"


def phase_table(run: RunLog) -> Table:
    """Mean seconds of each phase over the steps that have it, and its share of all time, in descending order."""
    table = [["phase", "s per step", "times", "total s", "share"]]
    totals = {}
    for key in run.tags():
        phase = key.removeprefix("timing_s/")
        if phase != key and "/" not in phase:
            values = [value for _, value in _training(run, key)]
            if values:
                totals[phase] = (sum(values), len(values))
    whole = totals.get("step", (sum(total for total, _ in totals.values()), 0))[0]
    for phase, (total, times) in sorted(totals.items(), key=lambda item: -item[1][0]):
        share = f"{100 * total / whole:.0f}%" if whole else "-"
        table.append([phase, f"{total / times:.3f}", str(times), f"{total:.1f}", share])
    return table


def tokens_per_second(run: RunLog) -> float | None:
    """Return the tokens of all training steps over their seconds, for the whole job."""
    seconds_key = "timing_s/step" if _training(run, "timing_s/step") else "perf/time_per_step"
    seconds = dict(_training(run, seconds_key))
    tokens = {step: value for step, value in _training(run, "perf/total_num_tokens") if step in seconds}
    total = sum(seconds[step] for step in tokens)
    return sum(tokens.values()) / total if total else None


def _training(run: RunLog, key: str) -> list[tuple[int, float]]:
    """Values of training steps: step 0 is validation before training."""
    return [(step, value) for step, value in run.series(key) if step > 0 and not math.isnan(value)]


if __name__ == "__main__":
    sys.exit(main())
