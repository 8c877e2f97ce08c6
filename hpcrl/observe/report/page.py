"""`hpcrl report`: what the folders of runs hold, as one HTML page that loads nothing and runs no code but its own;
or their metrics, as tables or as a picture.

Values are JSON in a script element that no browser executes; the page's script writes them into the document as text
only. A Content-Security-Policy allows the inlined scripts and styles by their hashes, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.observe.read.attempts import RUNNING
from hpcrl.observe.read.logs import shorten
from hpcrl.observe.read.recorded_run import RecordedRun, read_recorded_runs
from hpcrl.observe.read.runlog import RunError, RunLog, over_seeds, read_runs, step_range
from hpcrl.observe.record.progress import duration
from hpcrl.observe.report import tables
from hpcrl.observe.report.charts import (
    RankTimes,
    busy_of,
    curves_of,
    evenly_spaced,
    group_seeds,
    number,
    panels_of,
    phases_of,
    points_of,
    rank_times,
)
from hpcrl.observe.report.sample_choice import SampleChoice
from hpcrl.observe.report.verdict import verdict_of
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.runtime.launcher import format_spans
from hpcrl.sandbox.foreign_files import ERRORS, left_out, printable
from hpcrl.sandbox.new_files import draft_of

ROOM_FOR_SAMPLES = 4_500_000  # bytes of the page, of all runs together
MOST_WARNINGS, LONGEST_WARNING = 100, 1000  # groups of one run, of each origin
MOST_ATTEMPTS = 500  # the last ones
LONGEST_VALUE = 300  # characters of a config value
MOST_RANK_STEPS = 300  # columns of the heat map of ranks

PICTURES = (".png", ".pdf", ".svg", ".svgz", ".eps", ".jpg", ".jpeg")  # ends of --out
HEADLINES = ("critic/score/mean", "train/accuracy", "rewards/accuracies", "train/loss")  # the first that a run has


def page_data(runs: Sequence[RecordedRun], *, by_name: bool = False) -> dict[str, Any]:
    groups = group_seeds(runs, by_name)
    panels = panels_of([run.log for run in runs])
    keys = [key for panel in panels for key in panel["keys"]]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "panels": panels,
        "curves": curves_of(runs, groups, keys),
        "runs": [_run(run, ROOM_FOR_SAMPLES // len(runs), points_of(len(runs))) for run in runs],
        "config": config_table(runs),
    }


def _run(run: RecordedRun, room: int, points: int) -> dict[str, Any]:
    choice = SampleChoice(run.folder, room)
    samples = choice.data()
    notes = [*run.notes, *choice.notes]
    ranks = rank_times(run.folder, [straggler.rank for straggler in run.stragglers], notes)
    own = [group for group in run.warnings if group.is_own]
    shown = own[:MOST_WARNINGS] + [group for group in run.warnings if not group.is_own][:MOST_WARNINGS]
    story = run.attempts[-MOST_ATTEMPTS:]
    if len(story) < len(run.attempts):
        notes.append(f"slices: the last {MOST_ATTEMPTS} of {len(run.attempts)} are shown")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "verdict": verdict_of(run)._asdict(),
        "summary": _summary(run),
        "phases": phases_of(run.log, points),
        "busy": busy_of(run.log, points),
        "ranks": _rank_rows(ranks),
        "stragglers": [asdict(straggler) for straggler in run.stragglers[-1000:]],
        "attempts": [asdict(attempt) for attempt in story],
        "warnings": [
            asdict(group) | {"text": shorten(group.text, LONGEST_WARNING), "ranks": format_spans(sorted(group.ranks))}
            for group in shown
        ],
        "num_warnings": {"own": len(own), "libraries": len(run.warnings) - len(own)},
        "hangs": run.hangs,
        "checkpoints": [asdict(saved) | {"gib": number(saved.gib)} for saved in run.checkpoints],
        "samples": samples,
        "notes": notes,
    }


def _rank_rows(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """Busy seconds by rank, in the steps that any of the ranks recorded."""
    recorded = sorted({step for times in ranks for step in times.busy})
    steps = evenly_spaced(recorded, MOST_RANK_STEPS)
    rows = [
        {"rank": times.rank, "node": times.node, "seconds": [number(times.busy.get(step)) for step in steps]}
        for times in ranks
    ]
    return {"steps": steps, "rows": rows}


def _summary(run: RecordedRun) -> dict[str, Any]:
    """The row of the run in the table at the top."""
    steps = list(run.log.rows)
    headline = next((key for key in HEADLINES if run.log.training(key)), "")
    of_keys = (run.log.training(key) for key in (headline, "timing_s/step", "perf/throughput"))
    values, seconds, speeds = ([value for _, value in series] for series in of_keys)
    return {
        "step": steps[-1] if steps else None,
        "total": run.total_steps,
        "attempts": len(run.attempts),
        "lost": sum(attempt.lost_steps or 0 for attempt in run.attempts),
        "headline": headline or None,
        "first": number(values[0]) if values else None,
        "last": number(values[-1]) if values else None,
        "best": number(max(values)) if values else None,
        "time": duration(sum(seconds)) if seconds else None,
        "seconds_per_step": number(sum(seconds) / len(seconds)) if seconds else None,
        "throughput": number(speeds[-1]) if speeds else None,
        "ranks": next((attempt.ranks for attempt in reversed(run.attempts) if attempt.ranks), None),
        "nodes": next((attempt.nodes for attempt in reversed(run.attempts) if attempt.nodes), ""),
    }


def config_table(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Each key but the run's name with its value in each run, None where a run does not have it; differing ones are
    marked."""
    keys = sorted({key for run in runs for key in run.config} - {"run.name", "run.dir"})
    rows = []
    for key in keys:
        values = [_text(run.config[key]) if key in run.config else None for run in runs]
        differs = len(set(values)) > 1
        rows.append({"key": key, "values": values if differs else values[:1], "differs": differs})
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(str(value), LONGEST_VALUE)


ASSETS = Path(__file__).parent / "assets"
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("language.js", "uPlot.iife.min.js", "dom.js", "charts.js", "runs.js", "verdict.js", "samples.js", "main.js")
LICENCE = "uPlot.LICENSE"
_TO_ESCAPE = re.compile("[<>&\x7f]|[^\x00-\x7f]")  # all but ASCII is looked up


def render(data: Mapping[str, Any], title: str) -> bytes:
    """The page as UTF-8."""
    licence = f"/* uPlot:\n{(ASSETS / LICENCE).read_text(encoding='utf-8')}*/"
    style, script = licence + _joined(STYLES), licence + _joined(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(printable(title, one_line=True)),
        "STYLE": style,
        "DATA": json_in_html(data),
        "SCRIPT": script,
    }
    pieces = re.split(r"\{\{(\w+)\}\}", (ASSETS / "page.html").read_text(encoding="utf-8"))
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces).encode("utf-8", errors=ERRORS)


def json_in_html(data: Any) -> str:
    """JSON without the characters that could end a script element, and those that `printable` shows by other ones."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _TO_ESCAPE.sub(lambda found: _escaped(found[0]), text)


@cache
def _escaped(character: str) -> str:
    if character not in "<>&\x7f" and printable(character) == character:
        return character
    return json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names) + "\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def report_main(arguments: Sequence[str]) -> NoReturn:
    parser = ArgumentParser(
        prog="hpcrl report",
        description="What the folders of runs hold, as one HTML page that opens from disk: curves, times, slices, "
        "warnings and samples. Or their metrics, as a picture or as text. Needs neither torch nor MPI, and disturbs "
        "no job.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="a run's folder, <run.dir>/<run.name>; in place of a page also from a metrics.jsonl or an event file",
    )  # fmt: skip
    out = "page to write (%(default)s); a name that ends with .png, .pdf or .svg: picture of the curves"
    parser.add_argument("--out", metavar="FILE", default="report.html", help=out)
    parser.add_argument(
        "--seeds",
        action="store_true",
        help="show runs NAME_0, NAME_1, ... as their mean with a band, whatever their configs; without it, runs whose "
        "configs differ in the seed only",
    )
    text = parser.add_argument_group("metrics as text, in place of a page")
    text.add_argument("--text", action="store_true", help="a summary: steps, time, validation, seconds per phase")
    of_scalars = "first, last, min, max and mean of the last 10 values of the usual metrics, or:"
    text.add_argument("--scalars", action="store_true", help=of_scalars)
    text.add_argument("--keys", metavar="REGEX", help="metrics in whose key this is found; in a picture, a panel each")
    text.add_argument("--steps", metavar="A:B", help="of steps A to B, both included; either may be left out")
    shape = text.add_mutually_exclusive_group()
    shape.add_argument("--every", type=int, metavar="N", help="the values of every N-th step")
    shape.add_argument("--last", action="store_true", help="the last values, one column per run")
    text.add_argument("--csv", action="store_true", help="comma-separated values")
    options = parser.parse_args(arguments)
    is_picture = Path(options.out).suffix.lower() in PICTURES
    has_scalars = options.scalars or options.csv or options.last or options.every is not None
    has_scalars |= options.keys is not None and not is_picture
    has_scalars |= options.steps is not None and not (is_picture or options.text)
    with exits.one_line_for_user_errors():
        if not (is_picture or options.text or has_scalars):
            _print_verdicts(options)
            sys.exit(exits.DONE)
        runs = _logs(options)
        if is_picture:
            from hpcrl.observe.report.pictures import plot_runs, save_picture

            save_picture(lambda: plot_runs(runs, options.keys), Path(options.out), "--out")
            print(printable(options.out))
        texts = [printable(tables.summary(run)) for run in runs if options.text]
        if has_scalars:
            every, last = options.every, options.last
            texts.append(tables.scalars(runs, options.keys, every=every, last=last, as_csv=options.csv))
        if texts:
            print("\n\n".join(texts))
    sys.exit(exits.DONE)


def _logs(options: Namespace) -> list[RunLog]:
    """The metrics of the runs in the steps that the options name."""
    if options.every is not None and options.every < 1:
        raise RunError(f"--every {options.every}: expected a number of steps, 1 or more")
    steps = (None, None) if options.steps is None else step_range(options.steps)
    if steps is None:
        raise RunError(f"--steps {options.steps!r}: expected A:B, A:, :B or one step")
    runs = [run.between(*steps) for run in read_runs(options.runs)]
    if not any(run.rows for run in runs):
        raise RunError(f"no run has a step in --steps {options.steps}")
    return over_seeds(runs) if options.seeds else runs


def _print_verdicts(options: Namespace) -> None:
    """Write the page, and print what its first lines say of each run."""
    out = Path(options.out)
    runs = write_report(options.runs, out, by_name=options.seeds)
    for run in runs:
        sentences = " ".join(finding.text for finding in run["verdict"]["sentences"])
        print(printable(f"{run['name']}: {sentences}", one_line=True))
    size = out.stat().st_size / 1e6
    print(f"{printable(options.out)}: {size:.1f} MB, {len(runs)} run{'s' * (len(runs) > 1)}")


def write_report(paths: Sequence[str], out: Path, *, by_name: bool = False) -> list[dict[str, Any]]:
    """Write the page of the runs; returns what it shows of each. Raises InputError, one line."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a folder that exists")
    runs = _with_steps(read_recorded_runs(paths))
    data = page_data(runs, by_name=by_name)
    page = render(data, f"{', '.join(run.name for run in runs)[:100]} - hpcrl report")
    try:
        with draft_of(out, mode=0o600) as draft:  # for the owner only, as the run's folder
            draft.write_bytes(page)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from None
    return list(data["runs"])


def _with_steps(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs that finished a step, or have files that are not read; a line on stderr names the others. Raises
    InputError if there are only those."""
    lines = {run.name: _without_steps(run) for run in runs if not (run.has_steps or left_out(run.folder))}
    if len(lines) == len(runs):
        raise InputError("; ".join(lines.values()))
    for line in lines.values():
        print(printable(f"report: left out: {line}", one_line=True), file=sys.stderr)
    return [run for run in runs if run.name not in lines]


def _without_steps(run: RecordedRun) -> str:
    reason = run.attempts[-1].reason if run.attempts else "no rank wrote a log"
    what = "wait for its first step" if run.state == RUNNING else "correct that and start it again"
    return f"{run.folder}: the run never finished a step, {run.state or 'not started'} ({shorten(reason, 300)}); {what}"
