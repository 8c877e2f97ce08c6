"""A picture of a trace: a row for each track, for pages and papers. Perfetto shows more."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from hpcrl.sandbox.new_files import draft_of

Event = dict[str, Any]

MOST_TRACKS = 40  # rows of the picture; further tracks are left out
MOST_NAMES = 12  # in the legend, those with most time
WAITING = "#d0d0d0"


def draw(events: list[Event], path: Path, title: str) -> None:
    """Draw commands, phases, waits and background work of the first tracks, and arrows for transfers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = sorted(names, key=lambda track: track[::-1])[:MOST_TRACKS]
    row = {track: number for number, track in enumerate(tracks)}
    shown = [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] in ("command", "wait", "background", "phase")
        and event["name"] != "controller.step" and (event["pid"], event["tid"]) in row
    ]  # fmt: skip
    seconds: dict[str, float] = defaultdict(float)
    for event in shown:
        if event["cat"] in ("command", "background"):
            seconds[event["name"]] += event["dur"]
    longest = sorted(seconds, key=lambda name: -seconds[name])[:MOST_NAMES]
    palette = plt.get_cmap("tab20")
    colors = {name: palette(number % 20) for number, name in enumerate(longest)} | {"wait": WAITING}
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.4 * len(tracks)), layout="constrained")
    height = {"phase": 0.95, "command": 0.8, "wait": 0.8, "background": 0.6}
    color_of = {"phase": "#f0f0f0", "command": "#a0a0a0", "background": "#a0a0a0", "wait": WAITING}
    bars: dict[tuple[int, str, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in shown:
        where, color = row[event["pid"], event["tid"]], colors.get(event["name"], color_of[event["cat"]])
        bars[where, event["cat"], color].append((event["ts"] / 1e6, event["dur"] / 1e6))
    for order in ("phase", "command", "wait", "background"):
        for (where, category, color), spans in bars.items():
            if category == order:
                axes.broken_barh(spans, (where - height[order] / 2, height[order]), facecolors=color)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in [event for event in events if event["ph"] == "f" and event["id"] in starts][:200]:
        begin = starts[event["id"]]
        ends = [(one["ts"] / 1e6, row.get((one["pid"], one["tid"]))) for one in (begin, event)]
        if None not in (ends[0][1], ends[1][1]):
            arrow = {"arrowstyle": "->", "color": "black", "linewidth": 0.6}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
    axes.set_yticks(range(len(tracks)), [names[track] for track in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.margins(x=0.01)
    axes.set_xlabel("seconds")
    axes.set_title(title)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    with draft_of(path, mode=0o600) as draft:
        figure.savefig(draft, dpi=110)
    plt.close(figure)
