"""Experiment trackers of a run (wandb, MLflow). Each runs in a process of its own, which reads the run's metrics.jsonl.

Rank 0 starts the processes before its first step and sends them the final status; it sends no metrics. The file is the
queue, so a tracker that is slow, hangs or fails delays no step. What it has missed is logged by the next slice, because
every slice begins with all lines of the file.

A process has the tracker's packages and threads, and the processes that these start, so nothing of them is in a process
that has called MPI. `tracker_wandb.py` and `tracker_mlflow.py` have a class each; a further tracker is such a class, a
line in TRACKERS, and its name in the type of `trainer.logger`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from hpcrl.sandbox import fork_server, process_tree
from hpcrl.sandbox.foreign_files import ERRORS, writable
from hpcrl.sandbox.worker import describe

log = logging.getLogger(__name__)

TRACKERS = {"wandb": "hpcrl.observe.record.tracker_wandb", "mlflow": "hpcrl.observe.record.tracker_mlflow"}
ID_FILE = "trackers.json"
POLL_SECONDS = 1.0  # between two looks at the file
ATTEMPTS = 2  # of a slice to log to a tracker
FINISH_SECONDS = 20.0  # at the end of a slice, for all trackers together

Status = Literal["finished", "failed", "requeued"]


class Row(NamedTuple):
    """A line of metrics.jsonl."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker records of a run besides its metrics. `id` is the same in all slices."""

    folder: Path
    metrics_file: Path
    id: str
    project: str
    name: str
    parameters: Mapping[str, Any]  # dotted key -> value of the resolved config


class Tracker(Protocol):
    """The client of a tracker, in the tracker's process. Its constructor takes a TrackedRun."""

    def open(self, history: Sequence[Row]) -> int:
        """Open the run.

        Returns the last step of `history` that it has already, or -1: later rows are logged next.

        Args:
            history: rows of earlier slices; what the tracker has of other steps is superseded.
        """
        ...

    def log(self, rows: Sequence[Row]) -> None: ...

    def finish(self, status: Status) -> None:
        """Write everything and close the run."""
        ...


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those of these trackers that are not installed."""
    return [name for name in names if name in TRACKERS and not _is_installed(name)]


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # wandb leaves a folder `wandb`, which is a spec without origin


def run_id(folder: Path) -> str:
    """The id of the run in trackers, 16 hexadecimal digits: made once, and kept in the run's folder."""
    path = folder / ID_FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    name = blake2b(f"{os.uname().nodename}:{folder}:{time.time_ns()}".encode(errors=ERRORS), digest_size=8).hexdigest()
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps({"id": name}) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return name


class Trackers:
    """The trackers' processes, on rank 0. A tracker that fails costs one warning."""

    def __init__(
        self,
        names: Iterable[str],
        folder: Path,
        metrics_file: Path,
        *,
        project: str,
        name: str,
        parameters: Mapping[str, Any],
    ) -> None:
        """Start a process for each tracker.

        Args:
            names: keys of TRACKERS; others, which need no process, are ignored.
        """
        values = {key: writable(value) if isinstance(value, str) else value for key, value in parameters.items()}
        self._followers: dict[str, tuple[Connection, ForkServerProcess]] = {}
        for tracker in dict.fromkeys(each for each in names if each in TRACKERS):
            try:
                run = TrackedRun(folder, metrics_file, run_id(folder), writable(project), writable(name), values)
                pipe, far_end = fork_server.context().Pipe()
                arguments = far_end, TRACKERS[tracker], tracker, run, FINISH_SECONDS + 2.0
                self._followers[tracker] = pipe, fork_server.spawn(follow, arguments)
                far_end.close()
            except Exception as error:  # a full disk, no memory for a process
                _warn(tracker, describe(error))

    def poll(self) -> None:
        """Log a warning for each tracker that has failed since the last call. Does not wait."""
        for name, (pipe, _) in list(self._followers.items()):
            try:
                if pipe.poll():
                    _warn(name, str(pipe.recv()))
                    del self._followers[name]
            except (EOFError, OSError):
                _warn(name, "its process has ended")
                del self._followers[name]

    def finish(self, status: Status) -> None:
        """Send the final status, wait until the trackers have written everything, and end those that have not after
        FINISH_SECONDS."""
        self.poll()
        for pipe, _ in self._followers.values():
            with contextlib.suppress(OSError):
                pipe.send(status)
        deadline = time.monotonic() + FINISH_SECONDS
        for name, (pipe, process) in self._followers.items():
            process.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll():
                    _warn(name, str(pipe.recv()))
                    continue
            if process.is_alive():
                _warn(name, f"it did not finish within {FINISH_SECONDS:g} s")
                with contextlib.suppress(OSError):
                    process_tree.kill_tree(process.pid)  # type: ignore[arg-type]
            elif process.exitcode != 0:
                _warn(name, "its process has ended")
        self._followers = {}


def _warn(name: str, why: str) -> None:
    log.warning("tracker %s failed: %s; the run continues without it; see logs/tracker_%s.log", name, why, name)


def follow(pipe: Connection, module: str, name: str, run: TrackedRun, finish_seconds: float) -> None:
    """Log the rows of metrics.jsonl to a tracker as they are written, until the rank sends a status or ends.

    The main function of a tracker's process, which loads nothing of the tracker: it forks a process for that, and
    another one if the first fails. That one logs everything again: a signal that a batch system sends to all processes
    ends what a tracker has started, with the rows in its memory. If both fail, the first error is sent to the rank.
    """
    _prepare_process(run.folder / "logs" / f"tracker_{name}.log")
    rank = FinalStatus(pipe)
    errors: list[str] = []
    while len(errors) < ATTEMPTS:
        near, far = Pipe()
        child = os.fork()
        if child == 0:
            pipe.close()
            near.close()
            os._exit(_log_all(module, run, far))
        far.close()
        error = _supervise(child, near, rank, finish_seconds)
        process_tree.kill_descendants()
        if error is None:
            os._exit(0)
        errors.append(error)
    with contextlib.suppress(OSError):
        pipe.send(errors[0])
    os._exit(1)


class FinalStatus:
    """The final status of the run, once the other end of a pipe has sent it. If it closes without one, the run has
    failed."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.value: Status | None = None
        self.time = math.inf  # when it was received, monotonic

    def receive(self) -> None:
        """Wait for it."""
        try:
            self.value = self.pipe.recv()
        except (EOFError, OSError):
            self.value = "failed"
        self.time = time.monotonic()


def _supervise(child: int, pipe: Connection, rank: FinalStatus, finish_seconds: float) -> str | None:
    """Pass the final status on, and wait for the process that logs. Returns its error, or None."""
    if rank.value is not None:
        with contextlib.suppress(OSError):  # a process that has failed already: its error is read below
            pipe.send(rank.value)
    while True:
        seconds = rank.time + finish_seconds - time.monotonic()
        ready = wait([pipe, rank.pipe] if rank.value is None else [pipe], min(3600.0, max(0.0, seconds)))
        if pipe in ready:
            with contextlib.suppress(EOFError, OSError):
                return str(pipe.recv())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return None if code == 0 else f"its process ended with code {code}"
        if rank.pipe in ready:
            rank.receive()
            with contextlib.suppress(OSError):
                pipe.send(rank.value)
        elif seconds <= 0:  # the rank, which would end this process, may be gone
            process_tree.kill_descendants()
            os._exit(1)


def _log_all(module: str, run: TrackedRun, pipe: Connection) -> int:
    """The process that has the tracker. Returns its exit code; an error is sent to the supervisor."""
    try:
        tracker: Tracker = import_module(module).TRACKER(run)
        rank, reader = FinalStatus(pipe), RowReader(run.metrics_file)
        history = reader.read()
        last = tracker.open(history)
        rows = [row for row in history if row.step > last]
        while True:
            tracker.log(rows)
            if rank.value is not None:
                break
            if pipe.poll(POLL_SECONDS):
                rank.receive()
            rows = reader.read()  # after the final status, which is sent when the file is complete
        tracker.finish(rank.value)
        return 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(describe(error))
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _prepare_process(log_file: Path) -> None:
    """Signals of a batch system go to ranks only, output to a file, and ranks come first for CPU and memory."""
    signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)  # inherited by processes
    os.setsid()
    process_tree.adopt_orphans()
    process_tree.raise_oom_score()
    os.nice(10)
    os.environ["TMPDIR"] = tempfile.tempdir = util.get_temp_dir()  # of the rank: wandb leaves folders in it
    try:
        output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)


class RowReader:
    """Reads the lines that have been appended to a metrics.jsonl since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Row]:
        """The new whole lines, with NaN for null; empty if the file does not exist."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return [row for line in text.splitlines() if (row := _parse(line)) is not None]


def _parse(line: bytes) -> Row | None:
    """None for a line that is not a step's."""
    try:
        values = json.loads(line)
        step = values.pop("step")
        return Row(int(step), {name: math.nan if value is None else value for name, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
