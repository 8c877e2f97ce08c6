"""A comparison of evaluations as a picture: levels and differences with their 95% intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcrl.observe.read.comparison import Change, Comparison, Level
from hpcrl.observe.read.estimates import Estimate
from hpcrl.observe.report.curves import COLOURS
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import printable
from hpcrl.sandbox.new_files import draft_of

Point = tuple[str, str, Estimate]  # data source and metric, evaluation, value


def draw(comparison: Comparison, out: Path) -> None:
    """Write the plot of `plot_comparison`."""
    figure = plot_comparison(comparison)
    try:
        with draft_of(out, mode=0o600) as draft:  # for the owner only, as the runs that it is of
            figure.savefig(draft, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {out}: cannot write the picture ({error})") from None


def plot_comparison(comparison: Comparison) -> Figure:
    """Levels on the left and differences to the first evaluation on the right, a row of panels for each way of
    sampling. Bars are 95% intervals."""
    names = [_label(one.name) for one in comparison.evaluations]
    ways = comparison.ways
    points = [(_points(comparison.levels, way), _points(comparison.changes, way)) for way in ways]
    heights = [1.0 + 0.22 * len(levels) for levels, _ in points]
    columns = 2 if len(names) > 1 else 1
    figure, grid = plt.subplots(
        *(len(ways), columns),
        figsize=(5.2 * columns, sum(heights) + 0.5),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for way, axes, (levels, changes) in zip(ways, grid, points, strict=True):
        _forest(axes[0], levels, names, str(way))
        if columns == 2:
            _forest(axes[1], changes, names, f"difference to {names[0]}")
            axes[1].axvline(0, color="0.4", lw=0.8, zorder=0)
    handles = [plt.Line2D([], [], color=_colour(i), marker="o", ls="", label=name) for i, name in enumerate(names)]
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=min(len(names), 4), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # names may have dollar signs
    plt.close(figure)  # a notebook would show it twice
    return figure


def _points(rows: Sequence[Level] | Sequence[Change], way: object) -> list[Point]:
    points = []
    for row in rows:
        if row.way == way:
            values = row.estimates if isinstance(row, Level) else row.differences
            points += [(_label(f"{row.source} {metric}"), _label(row.name), value) for metric, value in values.items()]
    return points


def _forest(axes: Axes, points: Sequence[Point], names: Sequence[str], title: str) -> None:
    """Values with horizontal bars, one below the other, those of a data source and metric close together."""
    labels = list(dict.fromkeys(label for label, _, _ in points))
    for label, name, estimate in points:
        index = names.index(name)
        place = labels.index(label) + (index - (len(names) - 1) / 2) * 0.7 / len(names)
        low, high = estimate.interval
        axes.plot([low, high], [place, place], color=_colour(index), lw=1.6)
        axes.plot([estimate.mean], [place], color=_colour(index), marker="o", ms=5)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(text: str) -> str:
    return printable(text, one_line=True)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
