"""`hpcrl status`: the state of a run and of the other jobs of its chain, or of several runs, a line each.

It reads the runs' files and asks squeue, so it needs neither MPI nor torch, and disturbs no job.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any, NoReturn

from hpcrl.observe.read.logs import LEVELS, read_log
from hpcrl.observe.read.runlog import last_rows
from hpcrl.observe.record.progress import duration
from hpcrl.runtime import exits, run_owner
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.foreign_files import printable
from hpcrl.sandbox.new_files import read_json_or
from hpcrl.slurm.request import CHAIN_FILE, Link, read_chain
from hpcrl.slurm.template import INSIDE_RUN

# What a job improves, by its metric, and how it is called in the table; the first one that a run has.
REWARDS = {
    "critic/score/mean": "",
    "critic/rewards/mean": "",
    "rewards/accuracies": "accuracy ",
    "preference/accuracy": "accuracy ",
    "train/loss": "loss ",
}
STEPS_OF_TREND = 10
LOG_BYTES = 1 << 18  # of the end of rank 0's log, in which the last warning is searched
OVERVIEW_HEADER = ["run", "state", "step", "ETA", "reward", "trend", "slice", "left", "last warning"]


def runs_in(folder: Path) -> list[Path]:
    """The runs directly below a folder, by name; [] if it is itself a run's folder. Raises InputError if it is
    neither."""
    if (folder / CHAIN_FILE).exists():
        return []
    try:
        check_is_run(folder)
    except InputError:
        runs = [path for path in sorted(folder.iterdir()) if _is_run(path)] if folder.is_dir() else []
        if not runs:
            raise
        return runs
    return []


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("config.yaml", CHAIN_FILE, "metrics.jsonl"))


def overview(runs: Sequence[Path]) -> str:
    """The table, for the width of the terminal; whole lines where stdout is none."""
    progress_of = {run: read_progress(run) for run in dict.fromkeys(runs)}
    jobs = {run: _jobs_of(run, progress) for run, progress in progress_of.items()}
    queue = read_queue(sorted({job for of_run in jobs.values() for job in of_run}))
    queued = {
        run: next((queue[job] for job in jobs[run] if job in queue), None) if queue else None for run in progress_of
    }
    names = Counter(run.resolve().name for run in progress_of)
    table = [OVERVIEW_HEADER]
    states = states_of([(run, queued[run], progress) for run, progress in progress_of.items()])
    for (run, progress), (state, note) in zip(progress_of.items(), states, strict=True):
        name = run.resolve().name
        table.append(_overview_row(str(run) if names[name] > 1 else name, run, progress, queued[run], state, note))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join([*aligned(table, width), "", summary([state for state, _ in states], queue)])


def _jobs_of(run: Path, progress: Progress) -> list[str]:
    """Slurm's ids of the run's job: of the one that was submitted, and of the last slice."""
    found = []
    for link in read_chain(run) or ():
        if link.job and link.command not in INSIDE_RUN:
            places = [number for number, folder in enumerate(link.runs) if Path(folder).name == run.resolve().name]
            found += [link.job_of(number) for number in places[:1]]
    return [*found, *([progress.job] if progress.job is not None else [])]


def _overview_row(name: str, run: Path, progress: Progress, queued: Queued | None, state: str, note: str) -> list[str]:
    step, eta = step_and_eta(progress, state)
    reward, change = last_and_trend(progress.rows)
    warning = last_warning(run) if state != "failed" else note
    return [name, state, step, eta, reward, change, progress.slice_text, _left(queued, progress, state), warning or "-"]


def last_and_trend(rows: Mapping[int, Mapping[str, float]]) -> tuple[str, str]:
    """The last reward, and how much it has changed over the last STEPS_OF_TREND steps, by a line fitted to them."""
    for key, label in REWARDS.items():
        points = [(step, row[key]) for step, row in rows.items() if step > 0 and math.isfinite(row.get(key, math.nan))]
        if points:
            steps, values = zip(*points[-STEPS_OF_TREND:], strict=True)
            change = linear_regression(steps, values).slope * (steps[-1] - steps[0]) if len(steps) > 1 else None
            return f"{label}{values[-1]:.4g}", "-" if change is None else f"{change:+.2g}"
    return "-", "-"


def _left(queued: Queued | None, progress: Progress, state: str) -> str:
    """Wall time that is left to the slice: squeue's, or by the end of the allocation that the run has noted."""
    if state != "running":
        return "-"
    if queued is not None and queued.left and queued.left[0].isdigit():
        return queued.left
    return "-" if progress.ends_at is None else duration(max(progress.ends_at - time.time(), 0.0))


def last_warning(run: Path) -> str:
    """Time and first line of the last warning or error of hpcrl in rank 0's log; "" if there is none in its end."""
    try:
        lines = list(read_log(0, run / "logs" / "rank_00000.log", run, LOG_BYTES))
    except OSError:
        return ""
    for line in reversed(lines):
        if line.level in LEVELS and line.logger.startswith("hpcrl"):
            first, *_ = line.text.split("\n", 1)
            return f"{line.time[11:16]} {first}"
    return ""


RUNS_FOLDER = "runs"  # what a command without arguments shows: the default of run.dir
STEPS_OF_SPEED = 10  # the last steps, whose mean time the ETA is computed from
QUEUE_FORMAT = "%i|%T|%r|%N|%S|%A|%L"
WATCH_SECONDS = 10.0
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue, as squeue prints it. start: of this slice, or the expected one of a pending job. left:
    of its wall time."""

    state: str
    reason: str
    nodes: str
    start: str
    left: str = ""


@dataclass(frozen=True)
class Progress:
    """What a run's files say. exit: its exit.json, {} while it runs. rows: metrics of the last steps. job: Slurm's id
    and ends_at the end of the allocation, in seconds since the epoch, of the last slice."""

    step: int | None
    total: int | None
    seconds_per_step: float | None
    slices: int
    exit: Mapping[str, Any]
    rows: Mapping[int, Mapping[str, float]]
    job: str | None = None
    ends_at: float | None = None
    relaunch: int = 0  # starts again of the last slice's ranks, after the loss of a rank or node

    @property
    def slice_text(self) -> str:
        """The number of the slice, with that of the start again in it: '3', '3, relaunch 1'."""
        number = str(self.slices) if self.slices else "-"
        return f"{number}, relaunch {self.relaunch}" if self.relaunch else number

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the speed of the last ones; None if it is not known."""
        if self.step is None or self.total is None or self.seconds_per_step is None:
            return None
        return self.seconds_per_step * max(self.total - self.step, 0)


def main(arguments: Sequence[str]) -> NoReturn:
    parser = ArgumentParser(
        prog="hpcrl status",
        description="The state of a run and of the other jobs of its chain, or of several runs, a line each.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*",
        help=f"a run's folder, <run.dir>/<run.name>, any one of its chain; several, or a folder of runs: a line for "
        f"each; default: {RUNS_FOLDER}",
    )  # fmt: skip
    parser.add_argument(
        "--watch", metavar="SECONDS", type=float, nargs="?", const=WATCH_SECONDS,
        help=f"show it again every SECONDS ({WATCH_SECONDS:.0f}) until interrupted",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.watch is not None and not 0.1 <= options.watch <= 86400:
        parser.error(f"found --watch {options.watch}; expected seconds, at least 0.1")
    with exits.one_line_for_user_errors():
        text = reader_of(options.runs)
        if options.watch is None:
            print(text())
        else:
            watch(text, options.watch)
    sys.exit(exits.DONE)


def reader_of(paths: Sequence[str]) -> Callable[[], str]:
    """A function that returns the state of these runs as text: of one the table of its chain, of several a line each.
    It reads the files again each time."""

    if not paths:
        if not Path(RUNS_FOLDER).is_dir():
            raise InputError(
                f"status: no RUN is given and there is no folder {RUNS_FOLDER} here; name a run's folder, "
                "<run.dir>/<run.name>, or a folder of runs"
            )
        paths = [RUNS_FOLDER]
    if len(paths) == 1 and not runs_in(Path(paths[0])):
        return lambda: report(Path(paths[0]))
    return lambda: overview([run for path in paths for run in runs_in(Path(path)) or [Path(path)]])


def watch(text: Callable[[], str], seconds: float) -> None:
    """Print the text again and again, in a terminal in the same place, until Ctrl-C."""
    try:
        while True:
            shown = text()
            print(f"{CLEAR}{shown}" if sys.stdout.isatty() else f"{shown}\n", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return


def report(run: Path) -> str:
    """The table of the chain that `run` belongs to. Raises InputError if it is no run's folder."""
    links = read_chain(run)
    if links is None:
        check_is_run(run)
        links = [Link("run", 0, 0, read_progress(run).job or "", (str(run),), str(run))]
    queue = read_queue([link.job for link in links if link.job])
    table = [["job", "run", "nodes", "Slurm job", "slice", "step", "ETA", "state"]]
    listed = [(link, Path(folder), link.job_of(number)) for link in links for number, folder in enumerate(link.runs)]
    # the chain.json of another user may name any folder
    runs = [each for each in listed if each[1].resolve() == run.resolve() or read_chain(each[1]) == links]
    members = []
    for link, folder, job in runs:
        inside = folder / link.command if link.command in INSIDE_RUN else folder
        members.append((inside, (queue or {}).get(job), read_progress(inside)))
    states = states_of(members)
    table += [chain_row(*run, files[2], *state) for run, files, state in zip(runs, members, states, strict=True)]
    lines = [*aligned(table), "", summary([word for word, _ in states], queue)]
    if left_out := len(listed) - len(runs):
        lines.append(f"{left_out} of the chain's runs left out: their {CHAIN_FILE} differs")
    return "\n".join(lines)


def summary(states: Sequence[str], queue: Mapping[str, Queued] | None) -> str:
    """How many runs are in each state, and whether Slurm was asked."""
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return counts if queue is not None else f"{counts}\nno squeue here: what is queued or running is not known"


def aligned(table: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The lines of a table, whose cells may hold any text; longer ones than `width` are cut."""
    cells = [[printable(cell, one_line=True) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return [line if width is None or len(line) <= width else f"{line[: width - 3]}..." for line in lines]


def check_is_run(folder: Path) -> None:
    """Raise InputError if it is no run's folder."""
    if not any((folder / name).exists() for name in ("config.yaml", "exit.json", "metrics.jsonl", "tensorboard")):
        raise InputError(f"{folder} is no run's folder; expected <run.dir>/<run.name> of a run")


def chain_row(link: Link, run: Path, job: str, progress: Progress, state: str, note: str) -> list[str]:
    nodes = f"{link.nodes}x{link.ntasks_per_node}" if link.nodes else "-"
    step, eta = step_and_eta(progress, state)
    return [link.command, run.name, nodes, job or "-", progress.slice_text, step, eta, f"{state} {note}".rstrip()]


def step_and_eta(progress: Progress, state: str) -> tuple[str, str]:
    is_new = progress.step is None and progress.total is None
    step = "-" if is_new else f"{progress.step or 0}/{progress.total or '?'}"
    left = progress.seconds_left if state == "running" else None
    return step, "-" if left is None else duration(left)


def states_of(runs: Sequence[tuple[Path, Queued | None, Progress]]) -> list[tuple[str, str]]:
    """A word for the state of each run's folder, and what else there is to say. The second entry is None for a job that
    is not in the queue. Where neither Slurm nor exit.json decides, the owner of the folder does."""
    is_open = [
        folder
        for folder, queued, progress in runs
        if "code" not in progress.exit and (queued is None or queued.state == "PENDING")
    ]
    owners = run_owner.live_owners(is_open)
    return [state_of(queued, progress, owners.get(folder)) for folder, queued, progress in runs]


def state_of(queued: Queued | None, progress: Progress, owner: run_owner.Found | None) -> tuple[str, str]:
    """The state of one folder, as in `states_of`.

    Args:
        owner: the job that owns the folder, if it runs.
    """
    if owner is not None:
        return "running", f"on {owner.owner.host}" if owner.owner is not None else ""
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
    return "stopped", "(no exit code: it was killed)"


def read_progress(folder: Path) -> Progress:
    """Steps and their times, from the files in a run's folder; missing and torn ones count as nothing."""
    rows = last_rows(folder, STEPS_OF_SPEED)
    seconds = [row["timing_s/step"] for row in rows.values() if "timing_s/step" in row][-STEPS_OF_SPEED:]
    total = read_json_or(folder / "times.json", {}).get("total_steps")
    slices = read_json_or(folder / "slices.json", [])
    last = slices[-1] if slices and isinstance(slices[-1], dict) else {}
    job, ends_at, relaunch = last.get("job"), last.get("ends_at"), last.get("relaunch", 0)
    return Progress(
        step=max(rows) if rows else None,
        total=total if isinstance(total, int) else None,
        seconds_per_step=sum(seconds) / len(seconds) if seconds else None,
        slices=len(slices),
        exit=read_json_or(folder / "exit.json", {}),
        rows=rows,
        job=job if isinstance(job, str) and job.isdecimal() else None,
        ends_at=ends_at if isinstance(ends_at, (int, float)) else None,
        relaunch=relaunch if isinstance(relaunch, int) else 0,
    )


def read_queue(jobs: Sequence[str]) -> dict[str, Queued] | None:
    """Job id -> its entry, of those in the queue; an array's element has two ids, <array>_<number> and its own. None
    without squeue."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join(jobs)}", f"--format={QUEUE_FORMAT}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None  # jobs that ended long ago are forgotten
    queue = {}
    for line in answer.stdout.splitlines():
        job, *fields = line.split("|")
        if len(fields) >= 4:
            state, reason, nodes, start, *more = fields
            own, time_left = (*more, "", "")[:2]
            queue[job] = queue[own or job] = Queued(state, reason, nodes, start, time_left)
    return queue
