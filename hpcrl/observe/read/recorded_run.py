"""What the folder of a run holds, for a run that is running, has ended, was killed, or was copied in part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.observe.read.attempts import Attempt, attempts, event_files
from hpcrl.observe.read.logs import (
    LEVELS,
    MOST_BYTES,
    MOST_BYTES_IN_ALL,
    LogLine,
    Straggler,
    WarningGroup,
    batch_slices,
    group_warnings,
    log_files,
    read_log,
    read_stragglers,
    shorten,
)
from hpcrl.observe.read.runlog import RunError, RunLog, read_run, with_different_names
from hpcrl.observe.read.samples import recorded_steps
from hpcrl.observe.read.token_text import read_config
from hpcrl.runtime import rank_status
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import is_folder, left_out, read_text
from hpcrl.sandbox.new_files import read_json_or

KNOWN = ("metrics.jsonl", "tensorboard", "config.yaml", "logs", "rollouts", "exit.json", "checkpoints")
VERDICT = "verdict.md"  # of hpcrl.runtime.watchdog, which imports mpi4py
SECONDS_OF_LIFE = 120.0  # a run whose files are older than this has ended
MOST_LINES = 20_000  # warnings and errors that are grouped
MOST_CHECKPOINTS = 1000
MOST_HOSTS = 8  # names of nodes that are listed


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is there. gib: of all its files, None if its manifest is missing or damaged. is_exported:
    whether it has a Hugging Face directory."""

    step: int
    gib: float | None
    is_exported: bool


@dataclass(frozen=True)
class RecordedRun:
    """config: keys as `actor.optim.lr`; {} without config.yaml. notes: what could not be read, a line each."""

    name: str
    folder: Path
    log: RunLog
    config: dict[str, Any]
    times: dict[str, Any]
    attempts: list[Attempt]
    warnings: list[WarningGroup]
    hangs: list[str]
    stragglers: list[Straggler]
    checkpoints: list[SavedCheckpoint]
    rollout_steps: list[int]
    notes: list[str]

    @property
    def state(self) -> str:
        return self.attempts[-1].outcome if self.attempts else ("" if self.log.rows else "not started")

    @property
    def has_steps(self) -> bool:
        """Whether the folder shows a finished step: in its metrics, its log or its rollouts."""
        logged = any(attempt.last_step for attempt in self.attempts)
        return any(step > 0 for step in self.log.rows) or logged or bool(self.rollout_steps)

    @property
    def total_steps(self) -> int | None:
        total = self.times.get("total_steps")
        logged = self.attempts[-1].total_steps if self.attempts else None
        return total if isinstance(total, int) else logged


def read_recorded_runs(paths: Sequence[str]) -> list[RecordedRun]:
    """Read the runs; of those in folders of the same name, the names are the paths. Raises InputError, one line."""
    return with_different_names(paths, [read_recorded_run(Path(path)) for path in paths])


def read_recorded_run(folder: Path) -> RecordedRun:
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise InputError(f"{folder}: found {what}; expected the folder of a run, <run.dir>/<run.name>")
    if not any((folder / name).exists() for name in KNOWN):
        raise InputError(f"{folder}: found none of {', '.join(KNOWN)}; expected the folder of a run")
    notes: list[str] = []
    log = _metrics(folder, notes)
    rank_0, lines = _log_lines(folder, notes)
    slices = [part for part in read_json_or(folder / "slices.json", []) if isinstance(part, dict)]
    outputs = batch_slices(folder)
    story = attempts(
        rank_0,
        [line for line in lines if line.level != "WARNING"],
        event_files(folder),
        slices,
        outputs,
        read_json_or(folder / "exit.json", {}),
        last_sign(folder),
    )
    if story and not outputs:
        story[-1].nodes = _hosts(folder) or story[-1].nodes
    config = flatten(read_config(folder))
    if not config:
        notes.append("config.yaml: missing or damaged")
    notes += left_out(folder)
    return RecordedRun(
        name=log.name,
        folder=folder.absolute(),
        log=log,
        config=config,
        times=read_json_or(folder / "times.json", {}),
        attempts=story,
        warnings=group_warnings(lines),
        hangs=list(_hangs(folder)),
        stragglers=list(read_stragglers(folder)),
        checkpoints=list(_checkpoints(folder)),
        rollout_steps=recorded_steps(folder),
        notes=notes,
    )


def _metrics(folder: Path, notes: list[str]) -> RunLog:
    try:
        log = read_run(folder)
    except (OSError, ValueError, TypeError) as error:  # values that are no numbers
        why = f"metrics.jsonl cannot be read: {type(error).__name__}: {error}"
        notes.append(str(error) if isinstance(error, RunError) else why)
        return RunLog(folder.resolve().name, {})
    steps = list(log.rows)
    missing = steps[-1] - steps[0] + 1 - len(steps)
    if missing:
        notes.append(f"metrics of {missing} steps between {steps[0]} and {steps[-1]} are missing")
    return log


def _log_lines(folder: Path, notes: list[str]) -> tuple[list[LogLine], list[LogLine]]:
    """(all lines of rank 0, warnings and errors of all ranks)"""
    rank_0: list[LogLine] = []
    serious: list[LogLine] = []
    files = log_files(folder)
    if not files:
        notes.append("logs: no rank's log is there")
    bytes_to_read = MOST_BYTES_IN_ALL
    for rank, path in files.items():
        try:
            most = min(MOST_BYTES, bytes_to_read)
            size = path.lstat().st_size
            if size > most:
                notes.append(f"{path.name}: only the last {most / 2**20:.0f} of {size / 2**20:.0f} MiB were read")
            lines = list(read_log(rank, path, folder, most))
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        bytes_to_read -= min(size, most)
        if rank == 0:
            rank_0 = lines
        serious += [line for line in lines if line.level in LEVELS]
    if len(serious) > MOST_LINES:
        notes.append(f"logs: the last {MOST_LINES} of {len(serious)} warnings and errors are grouped")
        serious = sorted(serious, key=lambda line: line.time)[-MOST_LINES:]
    return rank_0, serious


def last_sign(folder: Path) -> tuple[str, bool]:
    """When the run last wrote a heartbeat or metrics, in words, and whether that is recent enough for a running
    one. Copies of a run may have the times of the copy."""
    paths = [folder / "metrics.jsonl", *_heartbeats(folder)]
    changed = max((path.lstat().st_mtime for path in paths if path.is_file()), default=None)
    if changed is None:
        return NO_SIGN, False
    age = time.time() - changed
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(changed))
    if age < SECONDS_OF_LIFE:
        return f"its files changed {max(age, 0):.0f} s before this report was made", True
    return f"no exit code; its files changed last at {when}: killed, or its node failed", False


NO_SIGN = "no exit code, no heartbeat and no metrics"


def _heartbeats(folder: Path) -> Iterator[Path]:
    place = folder / rank_status.FOLDER
    yield from place.glob("rank_*") if is_folder(place, folder) else ()


def _hosts(folder: Path) -> str:
    """Nodes of the last attempt, from its heartbeats."""
    hosts = set()
    for path in _heartbeats(folder):
        number = path.name.removeprefix("rank_")
        beat = rank_status.read_heartbeat(path.parent, int(number)) if number.isdigit() else None
        if beat is not None:
            hosts.add(str(beat.host))
    more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
    return ", ".join(sorted(hosts)[:MOST_HOSTS]) + more


def _hangs(folder: Path) -> Iterator[str]:
    try:
        yield shorten(read_text(folder / VERDICT, errors="replace"), 50_000)
    except OSError:
        return


def _checkpoints(folder: Path) -> Iterator[SavedCheckpoint]:
    place = folder / "checkpoints"
    paths = place.glob("step_*") if is_folder(place, folder) else ()
    folders = sorted(path for path in paths if path.name[5:].isdigit() and is_folder(path, folder))
    for path in folders[-MOST_CHECKPOINTS:]:
        files = read_json_or(path / "manifest.json", {}, folder).get("files")
        try:
            gib = sum(int(entry["bytes"]) for entry in files) / 2**30
        except (TypeError, KeyError, ValueError):
            gib = None
        yield SavedCheckpoint(int(path.name[5:]), gib, (path / "huggingface").is_dir())


MOST_KEYS = 5000


def flatten(tree: Any) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, up to MOST_KEYS keys: aliases of YAML make large trees of small files."""
    return dict(islice(_leaves(tree, ""), MOST_KEYS))


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
