"""A comparison of evaluations as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.observe.read.comparison import POOLED, Comparison, compare_evaluations
from hpcrl.observe.read.estimates import Difference, Estimate
from hpcrl.observe.read.evaluation import Way
from hpcrl.observe.report.scalars import Table, layout
from hpcrl.sandbox.foreign_files import printable


def show(paths: Sequence[str], *, as_json: bool, plot: str | None) -> None:
    """Print the comparison of evaluations, and draw it. Raises InputError, one line."""
    comparison = compare_evaluations(paths)
    if plot is not None:
        from hpcrl.observe.report.comparison_plot import draw

        draw(comparison, Path(plot))
    print(json.dumps(comparison.as_json(), indent=1) if as_json else printable("\n".join(lines_of(comparison))))


def lines_of(comparison: Comparison) -> Iterator[str]:
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


def level_table(comparison: Comparison, way: Way) -> Table:
    """A row for each data source and evaluation; a column for each metric."""
    levels = [level for level in comparison.levels if level.way == way]
    sources = list(dict.fromkeys(level.source for level in levels))
    levels.sort(key=lambda level: sources.index(level.source))
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
    changes = [change for change in comparison.changes if change.way == way]
    sources = list(dict.fromkeys(change.source for change in changes))
    changes.sort(key=lambda change: sources.index(change.source))
    table = [["data source", "run", "metric", "problems", "difference", "95% interval", "wins", "losses", "ties"]]
    for change in changes:
        for name, difference in change.differences.items():
            counts = [str(count) for count in (difference.wins, difference.losses, difference.ties)]
            cells = [str(difference.num_problems), with_error(difference), interval(difference), *counts]
            table.append([change.source, change.name, name, *cells])
    return table


def with_error(estimate: Estimate) -> str:
    sign = "+" if isinstance(estimate, Difference) else ""
    error = "" if math.isnan(estimate.standard_error) else f" +- {estimate.standard_error:.3f}"
    return f"{estimate.mean:{sign}.3f}{error}"


def interval(estimate: Estimate) -> str:
    low, high = estimate.interval
    return "-" if math.isnan(low) else f"[{low:+.3f}, {high:+.3f}]"
