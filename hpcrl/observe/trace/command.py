"""`hpcrl trace`: what every rank did in a step, as a file for https://ui.perfetto.dev, or as a picture.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.read.stragglers import read_stragglers
from hpcrl.observe.trace.perfetto import Event, Timeline, phases_of
from hpcrl.observe.trace.reader import TraceFiles, format_steps
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.foreign_files import ERRORS, printable
from hpcrl.sandbox.new_files import draft_of

MOST_TRACKS = 40  # rows of the picture; further tracks are left out
MOST_NAMES = 12  # in the legend, those with most time
WAITING = "#d0d0d0"


def draw_trace(events: list[Event], path: Path, title: str) -> None:
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


DESCRIPTION = "What every rank did in a step, as a file for https://ui.perfetto.dev."


def main(arguments: Sequence[str]) -> NoReturn:
    parser = ArgumentParser(prog="hpcrl trace", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run's folder, <run.dir>/<run.name>")
    parser.add_argument("--step", metavar="N", help="the step, or the first and the last as A:B; default: the newest")
    parser.add_argument(
        "--out", metavar="FILE", default="trace.json", help="default: trace.json; compressed if it ends in .gz"
    )
    parser.add_argument("--png", metavar="FILE", help="draw the trace into this picture, too")
    options = parser.parse_args(arguments)
    with exits.one_line_for_user_errors():
        png = Path(options.png) if options.png else None
        print_safely(export(Path(options.run), options.step, Path(options.out), png, print_safely))
    sys.exit(exits.DONE)


def print_safely(line: str) -> None:
    print(printable(line, one_line=True))


def export(
    run: Path, step: str | None, out: Path, png: Path | None = None, report: Callable[[str], None] = print
) -> str:
    """Write the trace of a step, or of the steps A:B, to `out`. Returns a line that says what is in it.

    report: called with a line for each file that is torn. Raises InputError.
    """
    if not run.is_dir():
        raise InputError(f"{run} is no run's folder; expected <run.dir>/<run.name> of a run")
    files = TraceFiles(run, report)
    first, last = steps_in(step, files.steps)
    steps = [one for one in files.steps if first <= one <= last]
    metadata: dict[str, Any] = {"run": str(run)}
    if steps:
        events = of_records(run, files, steps, metadata)
    else:
        events = of_metrics(run, (first, last) if step is not None else None, files.steps, metadata)
    drawn: list[Event] | None = [] if png is not None else None
    count = write_trace(out, events, metadata, drawn)
    if png is not None and drawn is not None:
        draw_trace(drawn, png, f"{run.name}, step {metadata['steps']}")
    described = f"{out}: step {metadata['steps']}, {count} events from {metadata['source']}"
    return f"{described}; open it at https://ui.perfetto.dev"


def steps_in(text: str | None, recorded: Sequence[int]) -> tuple[int, int]:
    """(first, last) of `--step`; the newest recorded step if it is not given."""
    if text is None:
        return (recorded[-1], recorded[-1]) if recorded else (0, 0)
    first, colon, last = text.partition(":")
    try:
        steps = int(first), int(last if colon else first)
    except ValueError:
        raise InputError(f"--step {text}: expected a number of a step, or A:B") from None
    if steps[0] > steps[1]:
        raise InputError(f"--step {text}: the first step is after the last one; expected A:B with A <= B")
    return steps


def of_records(run: Path, files: TraceFiles, steps: Sequence[int], metadata: dict[str, Any]) -> Iterator[Event]:
    """Events of recorded steps. Fills `metadata` while they are made."""
    windows = [files.window(step) for step in steps]
    timeline = Timeline(windows[0])
    missing = {step: set(files.ranks) for step in steps}
    stragglers = list(read_stragglers(run))
    thinned: dict[str, dict[str, float]] = {}
    error = 0.0
    for window, rank in files.read(windows):
        missing[window.step].discard(rank.rank)
        error = max(error, rank.error)
        for record in rank.records:
            if record.num_dropped:
                dropped = {"spans": record.num_dropped, "shorter_than_us": round(record.shortest * 1e6, 3)}
                thinned[f"step {record.step}, rank {rank.rank}"] = dropped
        yield from timeline.step(window, rank, stragglers)
    metadata |= {
        "source": "trace/",
        "steps": format_steps(list(steps)),
        "began": windows[0].began + windows[0].wall,
        "largest_clock_error_us": round(error * 1e6, 3),
        "ranks_without_records": {step: sorted(ranks) for step, ranks in missing.items() if ranks},
        "spans_left_out": thinned,
    }


def of_metrics(
    run: Path, asked: tuple[int, int] | None, recorded: Sequence[int], metadata: dict[str, Any]
) -> Iterator[Event]:
    """Events of steps without a trace: the seconds of each phase, of metrics.jsonl."""
    try:
        rows = read_run(run).rows
    except RunError as error:
        rows = {}
        if not recorded:
            raise InputError(str(error)) from error
    known = [step for step, row in rows.items() if "timing_s/step" in row]
    first, last = asked or (max(known, default=0),) * 2
    steps = [step for step in known if first <= step <= last]
    if not steps:
        traced = f"; with a trace: {format_steps(list(recorded))}" if recorded else ""
        raise InputError(
            f"{run} has no step {first if first == last else f'{first}:{last}'}; "
            f"expected one of {format_steps(sorted({*known, *recorded}))}{traced}"
        )
    metadata |= {
        "source": "metrics.jsonl",
        "steps": format_steps(steps),
        "note": "No trace of these steps was recorded: phases are drawn one after the other, as rank 0 measured them. "
        "The seconds are right, when they began is not known.",
    }
    return phases_of(rows, steps, list(read_stragglers(run)))


def write_trace(out: Path, events: Iterable[Event], metadata: dict[str, Any], drawn: list[Event] | None = None) -> int:
    """Write the file, whole or not at all; `metadata` is read after the last event. Returns the number of events.

    drawn: gets the events."""
    count = 0
    try:
        with draft_of(out, mode=0o600) as draft, _opened(draft, out.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for event in events:
                file.write(",\n" if count else "\n")
                file.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
                count += 1
                if drawn is not None:
                    drawn.append(event)
            file.write(f'\n], "metadata": {json.dumps(metadata, ensure_ascii=False)}}}\n')
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}; name another file") from error
    return count


def _opened(draft: Path, is_compressed: bool) -> TextIO:
    if is_compressed:
        return gzip.open(draft, "wt", encoding="utf-8", errors=ERRORS, compresslevel=3)  # type: ignore[return-value]
    return open(draft, "w", encoding="utf-8", errors=ERRORS)
