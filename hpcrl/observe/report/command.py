"""`hpcrl report`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.foreign_files import printable
from hpcrl.sandbox.new_files import draft_of


def main(arguments: Sequence[str]) -> NoReturn:
    parser = ArgumentParser(
        prog="hpcrl report",
        description="What the folders of runs hold, as one HTML page that opens from disk: curves, times, slices, "
        "warnings and samples. Needs neither torch nor MPI, and disturbs no job.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, <run.dir>/<run.name>")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="page to write (%(default)s)")
    parser.add_argument(
        "--seeds",
        action="store_true",
        help="show runs NAME_0, NAME_1, ... as their mean with a band, whatever their configs; without it, runs whose "
        "configs differ in the seed only",
    )
    parsed = parser.parse_args(arguments)
    with exits.one_line_for_user_errors():
        size = write_report(parsed.runs, Path(parsed.out), by_name=parsed.seeds)
        num_runs = f"{len(parsed.runs)} run{'s' * (len(parsed.runs) > 1)}"
        print(f"{printable(parsed.out)}: {size / 1e6:.1f} MB, {num_runs}")
    sys.exit(exits.DONE)


def write_report(runs: Sequence[str], out: Path, *, by_name: bool = False) -> int:
    """Write the page of the runs; returns its size in bytes. Raises InputError, one line."""
    from hpcrl.observe.read.recorded_run import read_recorded_runs
    from hpcrl.observe.report.page import render
    from hpcrl.observe.report.page_data import page_data

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a folder that exists")
    found = read_recorded_runs(runs)
    page = render(page_data(found, by_name=by_name), f"{', '.join(run.name for run in found)[:100]} - hpcrl report")
    try:
        with draft_of(out, mode=0o600) as draft:  # for the owner only, as the run's folder
            draft.write_bytes(page)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from None
    return len(page)
