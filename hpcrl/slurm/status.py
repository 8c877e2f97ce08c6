"""`hpcrl status`: the state of a run, and of the other jobs of its chain.

It reads the runs' files and asks squeue, so it needs neither MPI nor torch, and disturbs no job.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.runtime.json_file import read_json
from hpcrl.slurm import chain
from hpcrl.slurm.chain import Link
from hpcrl.slurm.template import INSIDE_RUN
from hpcrl.telemetry.progress import duration
from hpcrl.telemetry.runlog import RunError, read_run

STEPS_OF_SPEED = 10  # the last steps, whose mean time the ETA is computed from
FORMAT = "%i|%T|%r|%N|%S"


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue, as squeue prints it. start: of this slice, or the expected one of a pending job."""

    state: str
    reason: str
    nodes: str
    start: str


@dataclass(frozen=True)
class Progress:
    """What a run's files say. exit: its exit.json, {} while it runs."""

    step: int | None
    total: int | None
    seconds_per_step: float | None
    slices: int
    exit: Mapping[str, Any]


def main(arguments: Sequence[str]) -> NoReturn:
    parser = ArgumentParser(prog="hpcrl status", description="The state of a run, and of the other jobs of its chain.")
    parser.add_argument("run", metavar="RUN", help="a run's folder, <run.dir>/<run.name>: any one of the chain")
    with exits.one_line_for_user_errors():
        print(report(Path(parser.parse_args(arguments).run)))
    sys.exit(exits.DONE)


def report(run: Path) -> str:
    """The table of the chain that `run` belongs to. Raises InputError if it is no run's folder."""
    links = chain.read(run)
    if links is None:
        progress = read_progress(run)
        if progress.step is None and not progress.exit and not (run / "config.yaml").exists():
            raise InputError(f"{run} is no run's folder; expected <run.dir>/<run.name> of a run")
        links = [Link("run", 0, 0, "", (str(run),), str(run))]
    queue = read_queue([link.job for link in links if link.job])
    table = [["job", "run", "nodes", "Slurm job", "slice", "step", "ETA", "state"]]
    states: list[str] = []
    for link in links:
        for number, folder in enumerate(link.runs):
            job = f"{link.job}_{number}" if len(link.runs) > 1 or link.runs[0] != link.folder else link.job
            inside = Path(folder, link.command) if link.command in INSIDE_RUN else Path(folder)
            progress = read_progress(inside)
            queued = queue.get(job) if queue is not None else None
            state, note = state_of(queued, progress)
            states.append(state)
            table.append(row(link, Path(folder), job, progress, state, note))
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    unknown = "" if queue is not None else "\nno squeue here: what is queued or running is not known"
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)
    return "\n".join([*lines, "", counts + unknown])


def row(link: Link, run: Path, job: str, progress: Progress, state: str, note: str) -> list[str]:
    is_new = progress.step is None and progress.total is None
    step = "-" if is_new else f"{progress.step or 0}/{progress.total or '?'}"
    eta = "-"
    if state == "running" and None not in (progress.step, progress.total, progress.seconds_per_step):
        eta = duration(progress.seconds_per_step * max(progress.total - progress.step, 0))  # type: ignore[operator]
    nodes = f"{link.nodes}x{link.ntasks_per_node}" if link.nodes else "-"
    slices = str(progress.slices) if progress.slices else "-"
    return [link.command, run.name, nodes, job or "-", slices, step, eta, f"{state} {note}".rstrip()]


def state_of(queued: Queued | None, progress: Progress) -> tuple[str, str]:
    """A word for the state, and what else there is to say. `queued`: None for a job that is not in the queue."""
    if queued is not None:
        if queued.state == "PENDING":
            if queued.reason.startswith("Dependency"):
                return "waiting", "for the job before it"
            begins = f", starts {queued.start}" if queued.start not in ("", "N/A") else ""
            return "queued", f"({queued.reason}{begins})"
        return "running", f"on {queued.nodes}" if queued.state == "RUNNING" else f"({queued.state.lower()})"
    code = progress.exit.get("code")
    if code == exits.DONE:
        return "done", ""
    if code == exits.REQUEUE:
        return "stopped", "(saved; submit it again to continue)"
    if code is not None:
        return "failed", f"(exit code {code}: {' '.join(str(progress.exit.get('error')).split())[:120]})"
    if progress.step is None and not progress.slices:
        return "not started", ""
    return "stopped", "(no exit code: it was killed, or runs outside Slurm)"


def read_progress(folder: Path) -> Progress:
    """Steps and their times, from the files in a run's folder; missing and torn ones count as nothing."""
    try:
        rows = read_run(folder).rows
    except RunError:
        rows = {}
    seconds = [row["timing_s/step"] for row in rows.values() if "timing_s/step" in row][-STEPS_OF_SPEED:]
    total = read_json(folder / "times.json", {}).get("total_steps")
    return Progress(
        step=max(rows) if rows else None,
        total=total if isinstance(total, int) else None,
        seconds_per_step=sum(seconds) / len(seconds) if seconds else None,
        slices=len(read_json(folder / "slices.json", [])),
        exit=read_json(folder / "exit.json", {}),
    )


def read_queue(jobs: Sequence[str]) -> dict[str, Queued] | None:
    """Job id, with the number of an array's element -> its entry, of those in the queue. None without squeue."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", f"--format={FORMAT}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None  # jobs that ended long ago are forgotten
    found = {}
    for line in answer.stdout.splitlines():
        job, *fields = line.split("|")
        if len(fields) == 4:
            found[job] = Queued(*fields)
    return found
