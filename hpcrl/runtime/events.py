"""Events of a run, on which the commands of `job.on_event` run: rank 0 reports them to a process of its own.

    started   the first step of a slice is about to begin: of a new run, or of one that continues
    saved     a checkpoint is complete
    left      the run has saved and stops, to be continued by another slice (exit code 85)
    done      all steps are done
    hang      no rank made progress, and the watchdog ends the job
    failed    any other end: an error, bad input, or rank 0 was killed

`hpcrl.runtime.event_process` is what that process runs. It outlives rank 0, and so reports its end as well.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpcrl.runtime import exits, run_owner
from hpcrl.runtime.event_process import END_SECONDS, MOST_BYTES, RECORD, Settings, serve
from hpcrl.sandbox import fork_server

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class Events:
    """The process that runs the commands, on rank 0. Without commands there is none, and every call does nothing."""

    def __init__(self) -> None:
        self._events: Connection | None = None
        self._results: Connection | None = None
        self._at_end: dict[str, Any] = {}
        self._has_warned = False

    @classmethod
    def start(cls, run_dir: Path, commands: Sequence[str]) -> Events:
        """Start the process, through the fork server. Never raises: a run does not depend on it."""
        events = cls()
        job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT")
        settings = Settings(str(run_dir), tuple(commands), job, int(restart or 0), run_owner.number())
        try:
            reader, events._events = fork_server.context().Pipe(duplex=False)
            events._results, writer = fork_server.context().Pipe(duplex=False)
            fork_server.spawn(serve, (reader, writer, settings))
            reader.close()
            writer.close()
            os.set_blocking(events._events.fileno(), False)  # a process that was stopped must not stop rank 0
        except (OSError, EOFError) as error:
            log.warning("the commands of job.on_event do not run: %s", error)
            return cls()
        return events

    def emit(self, event: str, step: int, **details: Any) -> None:
        """Report an event. details: what the commands are given about it, as JSON. Does not wait."""
        self._send({"event": event, "step": step, **details})

    def at_step(self, step: int) -> None:
        """Note the step that the next events are about."""
        self._send({"step": step})

    def at_end(self, **details: Any) -> None:
        """Note what the commands are given about the end of the run."""
        self._at_end |= details

    def close(self, code: int) -> None:
        """Report the run's end with this exit code, and wait for the commands, END_SECONDS at most."""
        if self._events is None or self._results is None:
            return
        self._send({"end": code, **self._at_end})
        give_up = time.monotonic() + END_SECONDS
        while (left := give_up - time.monotonic()) > 0 and self._receive(left):
            pass
        self._events.close()
        self._events = None

    def _send(self, message: dict[str, Any]) -> None:
        if self._events is None:
            return
        line = json.dumps(message, default=str).encode() + b"\n"
        try:
            if len(line) <= MOST_BYTES:  # longer ones would not be written whole
                os.write(self._events.fileno(), line)
            while self._receive(0.0):
                pass
        except OSError:  # it has ended, or does not read
            self._warn("the process of job.on_event does not respond")

    def _receive(self, seconds: float) -> bool:
        """Read what the process reports about failed commands. Returns False if nothing came, or it has ended."""
        assert self._results is not None
        if not select.select([self._results], [], [], seconds)[0]:
            return False
        if text := os.read(self._results.fileno(), 1 << 16):
            self._warn(text.decode("utf-8", errors="replace").splitlines()[0])
        return bool(text)

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            log.warning("%s; later failures of job.on_event are only in logs/events.log", problem)
        self._has_warned = True


def prepare(run_dir: Path, rank: int, commands: Sequence[str]) -> Events:
    """Start the process on rank 0. On all ranks, an unplanned end of the job then waits for its commands."""
    if not commands:
        return Events()
    record = run_dir / RECORD
    exits.before_kill(partial(_wait_for_end, record, _size(record)))
    return Events.start(run_dir, commands) if rank == 0 else Events()


def _wait_for_end(record: Path, start: int) -> None:
    """Wait until the commands of the run's end have run, END_SECONDS at most: a launcher may kill them with the job.

    start: size of the record when the job began.
    """
    give_up = time.monotonic() + END_SECONDS
    while time.monotonic() < give_up:
        try:
            with open(record, encoding="utf-8", errors="replace") as file:
                file.seek(start)
                if '"last": true' in file.read():
                    return
        except OSError:
            pass
        time.sleep(POLL_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
