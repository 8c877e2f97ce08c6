"""Pictures by matplotlib: learning curves of runs, and comparisons of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpcrl.observe.read.comparison import Change, Comparison, Estimate, Level
from hpcrl.observe.read.runlog import RunError, RunLog, SeedMean, choose_keys
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import printable
from hpcrl.sandbox.new_files import draft_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#5F5F5F")
PHASE_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#72B7B2", "#B279A2", "#EECA3B", "#BAB0AC")
LINES = ("-", "--", ":", "-.")
# Validation and saving happen in a few steps only, and "step" contains the others.
NOT_A_PHASE = ("step", "testing", "save_checkpoint")
SMOOTHED_ABOVE = 30  # values in a curve; shorter ones are not smoothed

Panel = Callable[[Axes, list[RunLog]], None]
Point = tuple[str, str, Estimate]  # data source and metric, evaluation, value


def save_picture(plot: Callable[[], Figure], out: Path, option: str) -> None:
    """Write a plot, without a window for it. Raises InputError, one line.

    Args:
        option: the option that named the file.
    """
    matplotlib.use("Agg")
    figure = plot()
    try:
        with draft_of(out, mode=0o600) as draft:  # for the owner only, as the runs that it is of
            figure.savefig(draft, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"{option} {out}: cannot write the picture ({error})") from None


def plot_runs(runs: Sequence[RunLog], pattern: str | None = None) -> Figure:
    """Learning curves of runs, which a notebook shows.

    Args:
        pattern: a panel per key in which this regular expression is found, in place of the usual panels.
    """
    runs = list(runs)
    panels = _usual_panels(runs) if pattern is None else [_lines(key, [key]) for key in choose_keys(runs, pattern)]
    if not panels:
        raise RunError("the runs have none of the usual keys; choose some with --keys")
    columns = min(3, len(panels)) if len(panels) != 4 else 2
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.1 * rows + 0.4), squeeze=False, layout="constrained"
    )
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes, runs)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontsize=12, fontweight="bold")
    else:
        _legend_of_names(figure, [run.name for run in runs], lw=2)
    plt.close(figure)  # a notebook would show it twice
    return figure


def _usual_panels(runs: list[RunLog]) -> list[Panel]:
    tags = sorted({tag for run in runs for tag in run.tags()})
    # Means of verl's validation metrics; best@N and maj@N only with --keys.
    accuracy = [tag for tag in tags if re.fullmatch(r"val-core/.*/acc/mean@\d+", tag)] or [
        tag for tag in tags if re.fullmatch(r"val-core/.*/mean@\d+", tag)
    ]
    usual = [
        ("reward", ["critic/score/mean"]),
        ("loss", ["train/loss", "sft/loss", "val/loss"]),
        ("validation accuracy", accuracy),
        ("KL", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"]),
        ("entropy", ["actor/entropy"]),
        ("response length (tokens)", ["response_length/mean"]),
    ]
    panels = []
    for title, keys in usual:
        present = [key for key in keys if key in tags]
        if present:
            panels.append(_lines(title, present, percent=title == "validation accuracy" and "/acc/" in present[0]))
    if _phases(runs):
        panels.append(_phases_of_one_run if len(runs) == 1 else _phases_of_several_runs)
    return panels


def _lines(title: str, keys: list[str], *, percent: bool = False) -> Panel:
    """A curve per key and run. With one run, colours are keys; with several, colours are runs and dashes keys."""

    def panel(axes: Axes, runs: list[RunLog]) -> None:
        one = len(runs) == 1
        styles = ["-" if one else LINES[i % len(LINES)] for i in range(len(keys))]
        for i, key in enumerate(keys):
            for j, run in enumerate(runs):
                points = [(step, value) for step, value in run.series(key) if not math.isnan(value)]
                colour = _colour(i if one else j)
                if points:
                    _curve(axes, points, colour, styles[i])
                if points and isinstance(run, SeedMean):
                    _band(axes, run.series(key), run.band(key), colour)
        _decorate(axes, title)
        _steps_below(axes)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if len(keys) > 1:
            handles = [
                plt.Line2D([], [], color=_colour(i) if one else "0.3", ls=styles[i], label=label)
                for i, label in enumerate(_short(keys))
            ]
            axes.legend(handles=handles, fontsize=8, frameon=False, loc="best")

    return panel


def _curve(axes: Axes, points: list[tuple[int, float]], colour: str, style: str) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) > SMOOTHED_ABOVE:
        axes.plot(steps, values, color=colour, alpha=0.25, lw=0.8)
        axes.plot(steps, smooth(values, max(5, len(values) // 20)), color=colour, ls=style, lw=1.8)
    else:
        axes.plot(steps, values, color=colour, ls=style, lw=1.8, marker="o", ms=3.5)


def _band(axes: Axes, points: list[tuple[int, float]], widths: list[float], colour: str) -> None:
    values = [value for _, value in points]
    low = [value - width for value, width in zip(values, widths, strict=True)]
    high = [value + width for value, width in zip(values, widths, strict=True)]
    if len(points) > SMOOTHED_ABOVE:
        low, high = (smooth(edge, max(5, len(edge) // 20)) for edge in (low, high))
    axes.fill_between([step for step, _ in points], low, high, color=colour, alpha=0.2, lw=0)


def smooth(values: list[float], window: int) -> list[float]:
    """Centred mean over `window` values; half as many at the ends."""
    smoothed = []
    for i in range(len(values)):
        part = values[max(0, i - window // 2) : i + window // 2 + 1]
        smoothed.append(sum(part) / len(part))
    return smoothed


def _phases(runs: list[RunLog]) -> list[str]:
    """Return phases of the runs in descending order; beyond seven, the rest is summed as "other"."""
    totals: dict[str, float] = {}
    for run in runs:
        for phase, seconds in run.phases().items():
            if phase not in NOT_A_PHASE:
                totals[phase] = totals.get(phase, 0.0) + sum(seconds.values())
    ordered = sorted(totals, key=lambda phase: -totals[phase])
    return ordered if len(ordered) <= len(PHASE_COLOURS) else [*ordered[: len(PHASE_COLOURS) - 1], "other"]


def _seconds(run: RunLog, phases: list[str]) -> tuple[list[int], list[list[float]]]:
    """Return training steps, and for each phase its seconds in each of them."""
    all_phases = run.phases()
    steps = sorted({step for seconds in all_phases.values() for step in seconds})
    others = [phase for phase in all_phases if phase not in (*phases, *NOT_A_PHASE)]
    members = {phase: others if phase == "other" else [phase] for phase in phases}
    return steps, [
        [sum(all_phases.get(name, {}).get(step, 0.0) for name in members[phase]) for step in steps] for phase in phases
    ]


def _phases_of_one_run(axes: Axes, runs: list[RunLog]) -> None:
    phases = _phases(runs)
    steps, seconds = _seconds(runs[0], phases)
    axes.stackplot(steps, *seconds, labels=phases, colors=PHASE_COLOURS, step="mid", lw=0)
    _decorate(axes, "seconds per phase")
    _steps_below(axes)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1
    )


def _phases_of_several_runs(axes: Axes, runs: list[RunLog]) -> None:
    phases = _phases(runs)
    starts = [0.0] * len(runs)
    means = []
    for run in runs:
        steps, seconds = _seconds(run, phases)
        means.append([sum(values) / max(len(steps), 1) for values in seconds])
    for i, phase in enumerate(phases):
        widths = [of_run[i] for of_run in means]
        axes.barh(range(len(runs)), widths, left=starts, color=PHASE_COLOURS[i], label=phase, height=0.6)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    _decorate(axes, "mean seconds per phase", "x")
    axes.set_xlabel("seconds per step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_yticks(range(len(runs)), ["" for _ in runs])
    for i in range(len(runs)):
        axes.plot([0], [i], marker="s", ms=8, color=_colour(i), clip_on=False, zorder=5)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _decorate(axes: Axes, title: str, grid: Literal["x", "both"] = "both") -> None:
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


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
    _legend_of_names(figure, names, marker="o", ls="")
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
    _decorate(axes, title, "x")


def _legend_of_names(figure: Figure, names: Sequence[str], **line: Any) -> None:
    """A legend above the panels, in which each name has its colour."""
    handles = [plt.Line2D([], [], color=_colour(i), label=name, **line) for i, name in enumerate(names)]
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=min(len(names), 4), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # names may have dollar signs


def _label(text: str) -> str:
    return printable(text, one_line=True)


def _short(keys: list[str]) -> list[str]:
    """Return keys without their common prefix folders."""
    parts = [key.split("/") for key in keys]
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["/".join(part[shared:]) for part in parts]
