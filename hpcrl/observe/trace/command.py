"""`hpcrl trace`: what every rank did in a step, as a file for https://ui.perfetto.dev, or as a picture.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.observe.read.logs import read_stragglers
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.trace.perfetto import Event, Timeline, draw_trace, phases_of, write_trace
from hpcrl.observe.trace.records import TraceFiles, format_steps
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.foreign_files import printable

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

    Raises InputError.

    Args:
        report: called with a line for each file that is torn.
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
