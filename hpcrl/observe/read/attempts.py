"""The story of a run: each start of its processes, why it ended, what it resumed from and what was lost.

It is put together from the log of rank 0, TensorBoard's event files, slices.json, Slurm's output files, heartbeats and
exit.json; each of them may be missing. Each start of a run opens a new event file, so these say which steps it took
and when, also the steps that a kill lost and that metrics.jsonl no longer has.

The format of event files is that of TFRecord: uint64 length, crc, payload, crc; a payload is a protobuf message
`Event`, whose first fields are the time, a double, and the step, a varint.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.observe.read.logs import BatchSlice, LogLine, shorten
from hpcrl.runtime import exits
from hpcrl.sandbox.foreign_files import is_folder, open_file

EVENT_FOLDER = "tensorboard"
MOST_EVENT_BYTES = 512 * 2**20  # of a file; larger ones are not read
LONGEST_RECORD = 64 * 2**20

_EVENT_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+)\.\d+\.\d+")
_LENGTH = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_SUMMARY = 0x2A  # tag of Event.summary


@dataclass(frozen=True)
class EventFile:
    """opened, last_time: seconds since the epoch. Steps and last_time: None if no step was logged."""

    opened: int
    host: str
    first_step: int | None = None
    last_step: int | None = None
    last_time: float | None = None


def event_files(run: Path) -> list[EventFile]:
    """The event files of all starts, in the order in which they were opened: also those in `attempt_<n>`, which the
    next start without a checkpoint has set aside. Files that cannot be read have no steps."""
    folders = [
        folder for folder in (run / EVENT_FOLDER, *run.glob(f"attempt_*/{EVENT_FOLDER}")) if is_folder(folder, run)
    ]
    named = ((_EVENT_NAME.fullmatch(path.name), path) for folder in folders for path in folder.glob("*tfevents*"))
    found = (_read_event_file(path, run, int(name[1]), name[2]) for name, path in named if name)
    return sorted(found, key=lambda file: file.opened)


def _read_event_file(path: Path, run: Path, opened: int, host: str) -> EventFile:
    first: int | None = None
    last = -1, 0.0
    with suppress(OSError):
        for step, when in _summaries(path, run):
            first, last = first or step, max(last, (step, when))
    return EventFile(opened, host) if first is None else EventFile(opened, host, first, *last)


def _summaries(path: Path, run: Path) -> Iterator[tuple[int, float]]:
    """(step, time) of each summary of a training step, up to the first record that is torn. Those of step 0 are left
    out: it is also the step of what belongs to no step, such as the hyperparameters."""
    with open_file(path, run, most=MOST_EVENT_BYTES) as file:
        while len(header := file.read(12)) == 12:
            (length,) = _LENGTH.unpack_from(header)
            if length > LONGEST_RECORD or len(payload := file.read(length)) < length:
                return
            file.seek(4, 1)
            if length < 10 or payload[0] != 0x09:
                continue
            step, place = 0, 9
            if payload[place] == 0x10:
                step, place = _varint(payload, place + 1)
            if payload[place : place + 1] == bytes([_SUMMARY]) and 0 < step < 2**53:
                yield step, _TIME.unpack_from(payload, 1)[0]


def _varint(payload: bytes, place: int) -> tuple[int, int]:
    """(value, place after it)"""
    value = shift = 0
    while place < len(payload) and shift < 64:
        byte = payload[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            break
    return value, place


DONE, STOPPED, KILLED, FAILED, HANG, RUNNING = "done", "stopped", "killed", "failed", "hang", "running"
OF_CODE = {exits.DONE: DONE, exits.REQUEUE: STOPPED, exits.HANG: HANG}
STARTING = ("hpcrl.runtime.world", "hpcrl.runtime.gpus")  # loggers of lines that may stand before the first one here
PLACE = ("rank", "role", "phase")  # of an error, in exit.json
NO_END = "no end was logged: killed, or its node failed"

_START = re.compile(r"derived values on (\d+) ranks")
_RESUMED = re.compile(r"resuming after step (\d+) from ")
_BEGINS = re.compile(r"step (\d+) of (\d+) begins")
_SAVED = re.compile(r"saved .*step_(\d{8,})$")
_STOPPING = re.compile(r"stopping: (.*)", re.S)
_STOPPED = re.compile(r"stopped after step (\d+)")
_COMPLETE = re.compile(r"stopped at step (\d+): (.*)", re.S)
_NOTHING = re.compile(r"nothing to do: (.*)", re.S)
_SILENT = re.compile(r"no (rank made )?progress for \d+ s")
_RELAUNCH = re.compile(r"relaunch (\d+) in this slice: (.*)")
_ENDS = re.compile(r"rank (\d+) ends the job")


@dataclass
class Attempt:
    """One start of the run's processes: a slice of a chain of Slurm jobs, or a start by hand.

    started, ended: times of rank 0's first and last line. resumed_at: step of the checkpoint, None for none.
    first_step, last_step: those that it logged, None if it logged none. lost_steps: those that the next attempt had to
    take again, None if that is not known. reached: whether it came to training. relaunch: number of this start in its
    slice, after the loss of a rank or node, 0 for the first one.
    """

    started: str = ""
    ended: str = ""
    ranks: int | None = None
    nodes: str = ""
    job: str = ""
    restart: int | None = None
    resumed_at: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    total_steps: int | None = None
    saved: list[int] = field(default_factory=list)
    outcome: str = KILLED
    reason: str = NO_END
    requeued: bool = False
    lost_steps: int | None = None
    reached: bool = False
    relaunch: int = 0


def attempts(
    rank_0: Iterable[LogLine],
    errors: Iterable[LogLine],
    events: Sequence[EventFile],
    slices: Sequence[Mapping[str, Any]],
    outputs: Sequence[BatchSlice],
    exit_record: Mapping[str, Any],
    last_sign: tuple[str, bool],
) -> list[Attempt]:
    """All attempts, the oldest first.

    Args:
        errors: lines of level ERROR of all ranks.
        slices: the slices in slices.json.
        last_sign: when the run's files changed last, in words, and whether that means that it is running.
    """
    story = _from_log(rank_0)
    if not story:
        story = [Attempt(reason="its log is missing", reached=True) for _ in events]
        steps = [part.get("step") for part in slices]
        for attempt, step in zip(story, steps, strict=False) if len(story) == len(steps) else ():
            attempt.resumed_at = step if isinstance(step, int) and step >= 0 else None
    if len(story) <= len(events):  # logs of older versions do not have the line of the first step
        for attempt in story:
            attempt.reached = True
    _add_errors(story, errors)
    _add_events([attempt for attempt in story if attempt.reached], events)
    _add_slices([attempt for attempt in story if attempt.reached], slices, outputs)
    if story:
        _add_end(story[-1], exit_record, last_sign)
    for attempt, following in reversed(list(zip(story, story[1:], strict=False))):
        if attempt.outcome == KILLED and attempt.last_step and attempt.last_step == attempt.total_steps:
            attempt.outcome, attempt.reason = DONE, "all steps"
        if following.relaunch:  # slices.json has the last start of a slice
            attempt.job, attempt.restart = following.job, following.restart
        attempt.requeued = bool(attempt.job) and attempt.job == following.job and not following.relaunch
    _add_losses(story)
    return story


def _from_log(lines: Iterable[LogLine]) -> list[Attempt]:
    story: list[Attempt] = []
    for line in lines:
        if start := _START.match(line.text):
            story.append(Attempt(started=line.time, ranks=int(start[1])))
        if not story:
            continue  # the beginning of the log is missing
        if line.logger.split(".")[0] in ("hpcrl", "root") and line.logger not in STARTING:
            story[-1].ended = line.time
            _read_line(story[-1], line)
            if len(story) > 1 and (match := _RELAUNCH.match(line.text)):  # from the batch script
                story[-1].relaunch, story[-2].reason = int(match[1]), match[2]
    return story


def _read_line(attempt: Attempt, line: LogLine) -> None:
    text = line.text
    if match := _RESUMED.match(text):
        attempt.resumed_at, attempt.reached = int(match[1]), True
    elif match := _BEGINS.match(text):
        attempt.total_steps, attempt.reached = int(match[2]), True
    elif match := _SAVED.match(text):
        attempt.saved.append(int(match[1]))
        attempt.reached = True
    elif match := _STOPPING.match(text):
        attempt.outcome, attempt.reason = STOPPED, f"{match[1]} (the end of the save was not logged)"
    elif match := _STOPPED.match(text):
        attempt.outcome, attempt.last_step = STOPPED, int(match[1])
        attempt.reason = attempt.reason.removesuffix(" (the end of the save was not logged)")
    elif match := _COMPLETE.match(text):
        attempt.outcome, attempt.last_step, attempt.reason = DONE, int(match[1]), match[2]
    elif match := _NOTHING.match(text):
        attempt.outcome, attempt.reason, attempt.reached = DONE, text, True


def _add_errors(story: Sequence[Attempt], errors: Iterable[LogLine]) -> None:
    """The first hang or failure in each attempt, of whatever rank; by time, which needs clocks that agree roughly."""
    for line in sorted(errors, key=lambda line: line.time):
        attempt = next((one for one in reversed(story) if one.started and one.started <= line.time), None)
        if attempt is None or attempt.outcome == FAILED:
            continue
        if match := _SILENT.search(line.text):
            if attempt.outcome == HANG and match[1]:
                continue  # the line before the diagnosis, from another rank
            attempt.outcome, attempt.reason = HANG, shorten(line.text, 1000)
        elif match := _ENDS.match(line.text):
            last = line.text.rstrip().rsplit("\n", 1)[-1]
            attempt.outcome, attempt.reason = FAILED, f"rank {match[1]}: {shorten(last, 1000)}"


def _add_events(reached: Sequence[Attempt], events: Sequence[EventFile]) -> None:
    """Pair attempts and event files from the last ones backwards: an old log, or old files, may be missing."""
    for attempt, file in zip(reversed(reached), reversed(events), strict=False):
        attempt.first_step = file.first_step
        attempt.last_step = attempt.last_step if attempt.last_step is not None else file.last_step
        attempt.nodes = attempt.nodes or file.host
        attempt.started = attempt.started or _utc(file.opened)
        attempt.ended = attempt.ended or _utc(file.last_time or file.opened)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _add_slices(reached: Sequence[Attempt], slices: Sequence[Mapping[str, Any]], outputs: Sequence[BatchSlice]) -> None:
    """Slurm's job, restart and nodes. An entry of slices.json belongs to the last attempt that began with the
    checkpoint which it names; without that file, slices and attempts are paired if they are equally many."""
    entries = [part for part in slices if isinstance(part.get("job"), str) and isinstance(part.get("restart"), int)]
    for attempt in reversed(reached):
        step = -1 if attempt.resumed_at is None else attempt.resumed_at
        if entries and entries[-1].get("step") == step:
            part = entries.pop()
            attempt.job, attempt.restart = part["job"], part["restart"]
    if not slices and len(outputs) == len(reached):
        for attempt, output in zip(reached, outputs, strict=True):
            attempt.job, attempt.restart = output.job, output.restart
    by_slice = {(output.job, output.restart): output for output in outputs}
    for attempt in reached:
        batch = by_slice.get((attempt.job, attempt.restart or 0))
        if batch is None:
            continue
        attempt.nodes = batch.nodes or attempt.nodes
        attempt.last_step = batch.last_step if attempt.last_step is None else attempt.last_step
        if batch.ended:
            attempt.reason = batch.ended if attempt.reason == NO_END else f"{attempt.reason}; {batch.ended}"


def _add_end(last: Attempt, exit_record: Mapping[str, Any], last_sign: tuple[str, bool]) -> None:
    """The end of the last attempt: exit.json has priority."""
    code = exit_record.get("code")
    if isinstance(code, int):
        last.outcome = OF_CODE.get(code, FAILED)
        error = exit_record.get("error")
        if error:
            place = [f"{name} {exit_record[name]}" for name in PLACE if exit_record.get(name) is not None]
            where = f" ({', '.join(place)})" if place else ""
            last.reason = f"exit code {code}: {shorten(str(error), 1000)}{where}"
        elif last.reason == NO_END:
            last.reason = "all steps" if code == exits.DONE else f"exit code {code}"
    elif last.outcome == KILLED:
        sign, still = last_sign
        last.outcome = RUNNING if still else KILLED
        last.reason = sign if still or last.reason == NO_END else f"{last.reason}; {sign}"


def _add_losses(story: Sequence[Attempt]) -> None:
    for index, attempt in enumerate(story):
        following = next((later for later in story[index + 1 :] if later.reached), None)
        if attempt.last_step is not None and following is not None:
            attempt.lost_steps = max(attempt.last_step - (following.resumed_at or 0), 0)
