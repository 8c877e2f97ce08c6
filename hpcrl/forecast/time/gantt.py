"""A predicted step as a Gantt chart: a row for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrl.forecast.time.step import Prediction
from hpcrl.forecast.time.table import limits
from hpcrl.forecast.time.timeline import Span
from hpcrl.runtime.launcher import format_spans
from hpcrl.sandbox.new_files import draft_of

WIDTH = 11.0  # inches
BARS = 9.0  # inches of it for the time axis, about
LETTER = 0.066  # inches, of a label
LEGEND_COLUMNS = 3


def draw(path: Path, title: str, prediction: Prediction) -> None:
    """Draw the spans. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    spans = [span for span in prediction.spans if span.end > span.start]
    rows = rows_of(spans, prediction.roles)
    phases = [phase for phase in prediction.phases if any(_phase(span) == phase for span in spans)]
    palette = plt.get_cmap("Set3")
    colors = {phase: palette(number % palette.N) for number, phase in enumerate(phases)}
    last = max(span.end for span in spans)
    legend_lines = -(-len(phases) // LEGEND_COLUMNS)
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.55 * len(rows) + 0.2 * legend_lines), layout="constrained")
    for place, (_, mine) in enumerate(rows):
        for span in mine:
            length = span.end - span.start
            axes.barh(place, length, 0.8, span.start, color=colors[_phase(span)], edgecolor="black", linewidth=0.4)
            after = min((other.start for other in mine if other.start >= span.end), default=last)
            for text, at, align in labels(span, after, last):
                axes.text(at, place, text, ha=align, va="center", fontsize=8)
    for end in ends_of_steps(spans, prediction.roles):
        axes.axvline(end, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, last)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    handles = [Patch(color=color, label=_described(phase, prediction)) for phase, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False)
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=90)
    plt.close(figure)


def rows_of(spans: Sequence[Span], roles: Mapping[str, str]) -> list[tuple[str, list[Span]]]:
    """For each role: its name with its ranks, and the spans of its phases. A refit is the actor's and the engine's, on
    those ranks of them that take part."""
    ranks: dict[str, tuple[int, ...]] = {}
    for span in spans:
        if _phase(span) != "update_weights":
            ranks.setdefault(roles[_phase(span)], span.ranks)
    rows: dict[str, list[Span]] = {role: [] for role in ranks}
    for span in spans:
        phase = _phase(span)
        its = ("rollout", "actor") if phase == "update_weights" else (roles[phase],)
        for role in its:
            if role in rows and not set(ranks[role]).isdisjoint(span.ranks):
                rows[role].append(span)
    return [(f"{role}\nrank{'s'[: len(ranks[role]) > 1]} {format_spans(ranks[role])}", rows[role]) for role in rows]


def labels(span: Span, after: float, last: float) -> list[tuple[str, float, str]]:
    """The text of a bar, its place in seconds and its alignment; none if there is no room in the bar, nor beside it.

    after: when the next bar of the row begins. last: the end of the axis.
    """
    phase, _, step = span.task.partition("/")
    texts = (f"{phase}, step {step}", f"{phase} {step}", step) if step else (phase,)
    for text in texts:
        length = len(text) * LETTER / BARS * last
        if length < span.end - span.start:
            return [(text, (span.start + span.end) / 2, "center")]
        if not step and length * 1.05 < after - span.end:
            return [(text, span.end + 0.005 * last, "left")]
    return []


def ends_of_steps(spans: Sequence[Span], roles: Mapping[str, str]) -> list[float]:
    """When the trainer's part of each of several steps ends."""
    ends: dict[str, float] = {}
    for span in spans:
        phase, _, step = span.task.partition("/")
        if step and roles[phase] == "actor":
            ends[step] = max(ends.get(step, 0.0), span.end)
    return list(ends.values())


def _phase(span: Span) -> str:
    return span.task.partition("/")[0]


def _described(phase: str, prediction: Prediction) -> str:
    return f"{phase} {prediction.phases[phase]:.3g} s: {limits(prediction.parts[phase])}"
