"""Tables in a terminal: metrics of runs, validation and phases of a run, and comparisons of evaluations."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TypeVar

from hpcrl.observe.read.comparison import POOLED, Change, Comparison, Estimate, Level, compare_evaluations
from hpcrl.observe.read.evaluation import Way
from hpcrl.observe.read.runlog import RunLog, choose_keys
from hpcrl.observe.record.progress import duration, validation_means
from hpcrl.sandbox.foreign_files import printable

STATISTICS = ("first", "last", "min", "max", "mean10")
VALIDATION = "val-core/"

Table = list[list[str]]  # the first row is the header
Show = Callable[[float], str]
LevelOrChange = TypeVar("LevelOrChange", Level, Change)


def number(value: float) -> str:
    """Format with four significant digits; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


def scalars(
    runs: Sequence[RunLog], pattern: str | None, *, every: int | None = None, last: bool = False, as_csv: bool = False
) -> str:
    """Statistics of the keys of `pattern`, or of the usual ones; their values in each `every`-th step; or their last
    values. As comma-separated values with all digits, or for the width of the terminal."""
    keys, show = choose_keys(runs, pattern), repr if as_csv else number
    if last:
        table = last_values(runs, keys, show)
    elif every is not None:
        table = values_by_step(runs, keys, every, show)
    else:
        table = statistics_table(runs, keys, show)
    if as_csv:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(table)
        return file.getvalue().removesuffix("\n")
    width = shutil.get_terminal_size((120, 24)).columns
    return printable("\n\n".join(layout(block) for block in _blocks(table, width)))


def statistics_table(runs: Sequence[RunLog], keys: Sequence[str], show: Show) -> Table:
    """A row per key and run; rows of a key are adjacent."""
    table = [["key", *(["run"] if len(runs) > 1 else []), *STATISTICS]]
    for key in keys:
        for run in runs:
            values = [value for _, value in run.series(key)]
            if values:
                table.append([key, *([run.name] if len(runs) > 1 else []), *map(show, statistics(values))])
    return table


def statistics(values: list[float]) -> tuple[float, ...]:
    """Return STATISTICS of the values; NaNs count only as first and last."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return (math.nan,) * len(STATISTICS)
    tail = [value for value in values[-10:] if not math.isnan(value)]
    mean = sum(tail) / len(tail) if tail else math.nan
    return values[0], values[-1], min(known), max(known), mean


def last_values(runs: Sequence[RunLog], keys: Sequence[str], show: Show) -> Table:
    table = [["key", *(run.name for run in runs)]]
    for key in keys:
        series = [run.series(key) for run in runs]
        table.append([key, *(show(values[-1][1]) if values else "-" for values in series)])
    return table


def values_by_step(runs: Sequence[RunLog], keys: Sequence[str], every: int, show: Show) -> Table:
    """A row per step; a column per key and run. The last step is always included."""
    steps = sorted({step for run in runs for step in run.rows})
    columns = [(key, run) for key in keys for run in runs if run.series(key)]
    table = [["step", *(f"{key} [{run.name}]" if len(runs) > 1 else key for key, run in columns)]]
    for step in steps:
        if step % every == 0 or step == steps[-1]:
            row = [run.rows.get(step, {}).get(key) for key, run in columns]
            table.append([str(step), *("-" if value is None else show(value) for value in row)])
    return table


def layout(table: Table) -> str:
    """Format a table: text left-aligned, numbers right-aligned; a repeated first cell is left blank."""
    headers = [_header_lines(cell) if table[0][0] == "step" else [cell] for cell in table[0]]
    height = max(map(len, headers))
    top = [[""] * (height - len(lines)) + lines for lines in headers]
    rows = [*([lines[i] for lines in top] for i in range(height)), *table[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_left = [i == 0 or header == "run" for i, header in enumerate(table[0])]
    lines, above = [], None
    for row in rows:
        cells = ["" if row[0] == above else row[0], *row[1:]]
        above = row[0]
        padded = (c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, to_left, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _header_lines(cell: str) -> list[str]:
    """Split `timing_s/gen [run]` into three lines, so that the column is as narrow as its numbers."""
    return re.split(r"(?<=/)| (?=\[)", cell)


def _blocks(table: Table, width: int) -> list[Table]:
    """Split a table by step that is wider than the terminal by columns; each block starts with the first column."""
    if table[0][0] != "step":
        return [table]
    header = [max(_header_lines(cell), key=len) for cell in table[0]]
    widths = [max(map(len, column)) + 2 for column in zip(header, *table[1:], strict=True)]
    groups: list[list[int]] = [[]]
    used = widths[0]
    for column in range(1, len(widths)):
        if groups[-1] and used + widths[column] > width + 2:
            groups.append([])
            used = widths[0]
        groups[-1].append(column)
        used += widths[column]
    return [[[row[0], *(row[column] for column in group)] for row in table] for group in groups]


def summary(run: RunLog) -> str:
    """Steps and time of a run, the change of its validation metrics, the time of its phases, and its speed."""
    tables = (validation_table(run), phase_table(run))
    parts = [_heading("training", run), *(layout(table) for table in tables if len(table) > 1)]
    speed = tokens_per_second(run)
    if speed is not None:
        parts.append(f"tokens/s  {speed:,.0f}")
    return "\n\n".join(parts)


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
    """What to run next on a run's folder, for a shell.

    Args:
        launcher: how ranks are started.
    """
    run, on_ranks = quote(str(folder)), f"{launcher} python -m hpcrl".strip()
    commands = {"report": f"python -m hpcrl report {run} --out {quote(str(folder / 'report.html'))}"}
    if evaluates:
        commands["evaluate"] = f"{on_ranks} evaluate {quote(str(folder / 'config.yaml'))} model.init_from={run}"
    if exports:
        commands["export"] = f"{on_ranks} convert {run} {quote(str(folder / 'huggingface'))}"
    return commands


def _heading(label: str, run: RunLog) -> str:
    steps = [step for step in run.rows if step > 0]
    seconds = sum(value for _, value in run.training("timing_s/step"))
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
        is_share = "/acc/" in key
        show = "{:.1%}".format if is_share else number
        change = f"{100 * (after - before):+.1f}" if is_share else f"{after - before:+.4g}"
        table.append([key.removeprefix(VALIDATION), show(before), show(after), change, show(best), str(best_step)])
    return table


def phase_table(run: RunLog) -> Table:
    """Mean seconds of each phase over the steps that have it, and its share of all time, in descending order."""
    table = [["phase", "s per step", "times", "total s", "share"]]
    totals = {phase: (sum(seconds.values()), len(seconds)) for phase, seconds in run.phases().items()}
    whole = totals.get("step", (sum(total for total, _ in totals.values()), 0))[0]
    for phase, (total, times) in sorted(totals.items(), key=lambda item: -item[1][0]):
        share = f"{100 * total / whole:.0f}%" if whole else "-"
        table.append([phase, f"{total / times:.3f}", str(times), f"{total:.1f}", share])
    return table


def tokens_per_second(run: RunLog) -> float | None:
    """Return the tokens of all training steps over their seconds, for the whole job."""
    seconds = dict(run.training("timing_s/step") or run.training("perf/time_per_step"))
    tokens = {step: value for step, value in run.training("perf/total_num_tokens") if step in seconds}
    total = sum(seconds[step] for step in tokens)
    return sum(tokens.values()) / total if total else None


def show_comparison(paths: Sequence[str], *, as_json: bool, plot: str | None) -> None:
    """Print the comparison of evaluations, and draw it. Raises InputError, one line."""
    comparison = compare_evaluations(paths)
    if plot is not None:
        from hpcrl.observe.report.pictures import plot_comparison, save_picture

        save_picture(lambda: plot_comparison(comparison), Path(plot), "--plot")
    if as_json:
        print(json.dumps(comparison.as_json(), indent=1))
    else:
        print(printable("\n".join(comparison_lines(comparison))))


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The tables of each way of sampling, then the notes."""
    for way in comparison.ways:
        yield f"{way}\n"
        yield layout(level_table(comparison, way)) + "\n"
        if any(change.way == way for change in comparison.changes):
            yield f"difference to {comparison.evaluations[0].name}\n"
            yield layout(difference_table(comparison, way)) + "\n"
    yield "+-: standard error over problems; [ ]: 95% interval"
    if any(level.source == POOLED for level in comparison.levels):
        yield f"{POOLED}: the problems of all data sources, each with the same weight"
    yield from (f"note: {note}" for note in comparison.notes)


def _by_source(rows: Sequence[LevelOrChange], way: Way) -> list[LevelOrChange]:
    """The rows of a way of sampling; those of a data source are adjacent."""
    rows = [row for row in rows if row.way == way]
    sources = list(dict.fromkeys(row.source for row in rows))
    return sorted(rows, key=lambda row: sources.index(row.source))


def level_table(comparison: Comparison, way: Way) -> Table:
    """A row for each data source and evaluation; a column for each metric."""
    levels = _by_source(comparison.levels, way)
    metrics = list(dict.fromkeys(name for level in levels for name in level.estimates))
    table = [["data source", "run", "problems", *metrics, "tokens", "truncated"]]
    for level in levels:
        estimates = [level.estimates.get(name) for name in metrics]
        count = next(iter(level.estimates.values())).num_problems
        cells = ["-" if one is None else with_error(one) for one in estimates]
        table.append([level.source, level.name, str(count), *cells, f"{level.length:.1f}", f"{level.truncated:.1%}"])
    return table


def difference_table(comparison: Comparison, way: Way) -> Table:
    """A row for each data source, evaluation and metric."""
    table = [["data source", "run", "metric", "problems", "difference", "95% interval", "wins", "losses", "ties"]]
    for change in _by_source(comparison.changes, way):
        for name, difference in change.differences.items():
            low, high = difference.interval
            interval = "-" if math.isnan(low) else f"[{low:+.3f}, {high:+.3f}]"
            counts = [str(count) for count in (difference.wins, difference.losses, difference.ties)]
            cells = [str(difference.num_problems), with_error(difference, "+"), interval, *counts]
            table.append([change.source, change.name, name, *cells])
    return table


def with_error(estimate: Estimate, sign: str = "") -> str:
    error = "" if math.isnan(estimate.standard_error) else f" +- {estimate.standard_error:.3f}"
    return f"{estimate.mean:{sign}.3f}{error}"
