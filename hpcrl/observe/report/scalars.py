"""Tabulate and compare metrics of runs on a login node: `python -m hpcrl.observe.report.scalars RUN [RUN...]`."""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence

from hpcrl.observe.read.runlog import RunError, RunLog, choose_keys, read_runs
from hpcrl.sandbox.foreign_files import printable, take_any_text

STATISTICS = ("first", "last", "min", "max", "mean10")
Table = list[list[str]]  # the first row is the header
Show = Callable[[float], str]


def main(arguments: Sequence[str] | None = None) -> int:
    take_any_text()
    options = _parser().parse_args(arguments)
    try:
        if options.every is not None and options.every < 1:
            raise RunError(f"--every {options.every}: expected a number of steps, 1 or more")
        first, last = _step_range(options.steps)
        runs = [run.between(first, last) for run in read_runs(options.runs)]
        if not any(run.rows for run in runs):
            raise RunError(f"no run has a step in --steps {options.steps}")
        print_table(_table(runs, options), as_csv=options.csv)
    except RunError as error:
        print(printable(f"scalars: error: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; the interpreter must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.observe.report.scalars",
        description="Tabulate and compare metrics of runs. By default: first, last, min, max and the mean of the "
        "last 10 values of the usual keys.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, metrics.jsonl or event file")
    parser.add_argument("--keys", metavar="REGEX", help="show the keys in which this is found")
    parser.add_argument("--steps", metavar="A:B", help="only steps A to B, both included; either may be left out")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--every", type=int, metavar="N", help="show the values of every N-th step")
    shape.add_argument("--last", action="store_true", help="show only the last value, one column per run")
    parser.add_argument("--csv", action="store_true", help="print comma-separated values")
    return parser


def _step_range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        if not colon:
            return int(first), int(first)
        return (int(first) if first else None), (int(last) if last else None)
    except ValueError:
        raise RunError(f"--steps {text!r}: expected A:B, A:, :B or one step") from None


def _table(runs: list[RunLog], options: argparse.Namespace) -> Table:
    keys = choose_keys(runs, options.keys)
    show = repr if options.csv else number
    if options.last:
        return last_values(runs, keys, show)
    if options.every is not None:
        return values_by_step(runs, keys, options.every, show)
    return summary(runs, keys, show)


def summary(runs: list[RunLog], keys: list[str], show: Show) -> Table:
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


def last_values(runs: list[RunLog], keys: list[str], show: Show) -> Table:
    table = [["key", *(run.name for run in runs)]]
    for key in keys:
        series = [run.series(key) for run in runs]
        table.append([key, *(show(values[-1][1]) if values else "-" for values in series)])
    return table


def values_by_step(runs: list[RunLog], keys: list[str], every: int, show: Show) -> Table:
    """A row per step; a column per key and run. The last step is always included."""
    steps = sorted({step for run in runs for step in run.rows})
    shown = [step for step in steps if step % every == 0 or step == steps[-1]]
    columns = [(key, run) for key in keys for run in runs if run.series(key)]
    names = [f"{key} [{run.name}]" if len(runs) > 1 else key for key, run in columns]
    table = [["step", *names]]
    for step in shown:
        row = [run.rows.get(step, {}).get(key) for key, run in columns]
        table.append([str(step), *("-" if value is None else show(value) for value in row)])
    return table


def number(value: float) -> str:
    """Format with four significant digits; whole numbers in full."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


def print_table(table: Table, *, as_csv: bool) -> None:
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        sys.stdout.flush()
        return
    width = shutil.get_terminal_size((120, 24)).columns
    print(printable("\n\n".join(layout(block) for block in _blocks(table, width))), flush=True)


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


if __name__ == "__main__":
    sys.exit(main())
