"""Events of a run, on which the commands of `job.on_event` run: rank 0 reports them to a process of its own.

    started   the first step of a slice is about to begin: of a new run, or of one that continues
    saved     a checkpoint is complete
    left      the run has saved and stops, to be continued by another slice (exit code 85)
    done      all steps are done
    hang      no rank made progress, and the watchdog ends the job
    failed    any other end: an error, bad input, or rank 0 was killed

The process runs one command after the other, for each event. It outlives rank 0, and so reports its end as well: a
launcher's signals do not end it. When rank 0 ends, or an exit.json appears that no planned end has written, it reports
the run's end, has END_SECONDS for the commands, and exits. Once another job has taken the run's folder, it starts no
command.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shlex
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from hpcrl.runtime import exits, run_owner
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.foreign_files import ERRORS, printable
from hpcrl.sandbox.new_files import read_json_or
from hpcrl.sandbox.process_tree import STOP_SIGNALS

log = logging.getLogger(__name__)

OUTPUT_FILE = "logs/events.log"  # of the commands
RECORD_FILE = "logs/events.jsonl"  # a line for each command that has run
COMMAND_SECONDS = 60.0  # for a command; then it is killed
END_SECONDS = 5.0  # for the commands of the run's end
TICK_SECONDS = 0.2
POLL_SECONDS = 0.1  # in which ranks look whether the commands of the end have run
MOST_BYTES = 4096  # of a message: a pipe takes up to so many as a whole
LONGEST_TEXT = 2000  # characters of a text in the environment
LAST_EVENTS = {exits.DONE: "done", exits.REQUEUE: "left", exits.HANG: "hang"}  # exit code -> event; others: failed
CONTINUES = ("started", "saved")


class Settings(NamedTuple):
    """folder: of the run. job, restart: Slurm's. owner: number of the job among the folder's owners, if it has one."""

    folder: str
    commands: tuple[str, ...]
    job: str | None = None
    restart: int = 0
    owner: int | None = None


class Pending(NamedTuple):
    command: str
    event: dict[str, Any]
    is_last: bool  # the last command of the run's end


class Running(NamedTuple):
    process: subprocess.Popen[bytes]
    pending: Pending
    began: float  # monotonic time


def serve(events: Connection, results: Connection, settings: Settings) -> NoReturn:
    """Run the commands until the run has ended. In a child of the fork server."""
    for signum in (signal.SIGHUP, signal.SIGQUIT, *STOP_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)  # the commands inherit it
    os.setsid()
    output = open(Path(settings.folder) / OUTPUT_FILE, "ab", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # else launchers wait for the end of this process, which has the rank's pipes
        os.dup2(output.fileno() if number else nothing, number)
    os.set_blocking(results.fileno(), False)
    try:
        Runner(events.fileno(), results.fileno(), settings, output).run()
    finally:
        os._exit(0)


class Runner:
    def __init__(self, events: int, results: int, settings: Settings, output: IO[bytes]) -> None:
        """Set up the runner, with no command running.

        Args:
            events, results: file descriptors, of JSON lines from rank 0 and of lines of text to it.
        """
        self._events, self._results, self._settings, self._output = events, results, settings, output
        self._folder = Path(settings.folder)
        self._buffer = b""
        self._queue: deque[Pending] = deque()
        self._running: Running | None = None
        self._facts: dict[str, Any] = {"step": 0}  # what was reported last
        self._give_up: float | None = None  # monotonic time; set once the run has ended
        self._is_open = True

    def run(self) -> None:
        while self._give_up is None or self._queue or self._running:
            if self._give_up is not None and time.monotonic() > self._give_up:
                break
            self._read()
            if self._give_up is None and (found := self._unplanned_end()) is not None:
                self._end(found.get("code"), found)
            self._advance()
        if self._running is not None:
            self._finish(self._running, f"killed, because the run has ended {END_SECONDS:.0f} s ago")

    def _read(self) -> None:
        """Wait a tick for messages, and queue their events."""
        files = [self._events] if self._is_open else []
        if not select.select(files, [], [], TICK_SECONDS if self._running is None else TICK_SECONDS / 10)[0]:
            return
        text = os.read(self._events, 1 << 16)
        if not text:
            self._is_open = False
            if self._give_up is None:
                outcome = self._exit_json()
                self._end(outcome.get("code"), outcome or {"error": "rank 0 was killed"})
            return
        *lines, self._buffer = (self._buffer + text).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                self._end(message.pop("end"), message)
            elif "event" in message:
                self._add(message)
            else:
                self._facts |= message

    def _unplanned_end(self) -> dict[str, Any] | None:
        """The contents of exit.json, if it is that of a hang or an error."""
        found = self._exit_json()
        return found if found.get("code") not in (None, exits.DONE, exits.REQUEUE) and not self._is_lost() else None

    def _exit_json(self) -> dict[str, Any]:
        return read_json_or(self._folder / "exit.json", {})

    def _end(self, code: Any, details: dict[str, Any]) -> None:
        """Queue the event of the run's end; events that still wait are dropped."""
        if self._give_up is not None:
            return
        self._give_up = time.monotonic() + END_SECONDS
        self._queue = deque(pending for pending in self._queue if pending.event["event"] not in CONTINUES)
        cut = {name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in details.items()}
        self._add({**cut, "event": LAST_EVENTS.get(code, "failed"), "code": code})

    def _add(self, message: dict[str, Any]) -> None:
        if message["event"] == "started":
            self._facts |= {name: message[name] for name in ("step", "total_steps")}
        settings = self._settings
        event = {
            "event": message["event"],
            "run": self._folder.name,
            "folder": settings.folder,
            "time": time.time(),
            "host": socket.gethostname(),
            "job": settings.job,
            "restart": settings.restart,
            **self._facts,
            **message,
        }
        event["message"] = printable(sentence(event), one_line=True)
        is_end = event["event"] not in CONTINUES
        for number, command in enumerate(settings.commands, 1):
            self._queue.append(Pending(command, event, is_end and number == len(settings.commands)))

    def _advance(self) -> None:
        """Start the next command once the one before has ended."""
        running = self._running
        if running is not None:
            code = running.process.poll()
            if code is not None:
                self._finish(running, None if code == 0 else f"exit code {code}")
            elif time.monotonic() - running.began > COMMAND_SECONDS:
                self._finish(running, f"killed after {COMMAND_SECONDS:.0f} s")
        if self._running is None and self._queue:
            if self._is_lost():
                self._queue.clear()
            else:
                self._start(self._queue.popleft())

    def _is_lost(self) -> bool:
        owner = self._settings.owner
        return owner is not None and run_owner.is_lost(self._folder, owner)

    def _start(self, pending: Pending) -> None:
        line = json.dumps(pending.event, default=str)
        self._output.write(
            f"{time.strftime('%F %T')} {pending.event['message']}: {pending.command}\n".encode(errors=ERRORS)
        )
        try:
            process = subprocess.Popen(
                shlex.split(pending.command),
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                env=os.environ | command_variables(pending.event, line),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._record(pending, f"cannot be started: {getattr(error, 'strerror', None) or error}", 0.0)
            return
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it does not read its input
        self._running = Running(process, pending, time.monotonic())

    def _finish(self, running: Running, problem: str | None) -> None:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)  # and what it has started, in its session
        running.process.wait()
        self._running = None
        self._record(running.pending, problem, time.monotonic() - running.began)

    def _record(self, pending: Pending, problem: str | None, seconds: float) -> None:
        event = pending.event
        row = {name: event[name] for name in ("time", "event", "step")} | {"command": pending.command}
        row |= {"problem": problem, "seconds": round(seconds, 3), "last": pending.is_last}
        with open(self._folder / RECORD_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if problem is None:
            return
        line = f"job.on_event: {pending.command} on {event['event']}, step {event['step']}: {problem}\n".encode(
            errors=ERRORS
        )
        self._output.write(line)
        try:
            os.write(self._results, line[:MOST_BYTES])
        except OSError:
            pass  # rank 0 has ended


def command_variables(event: dict[str, Any], line: str) -> dict[str, str]:
    """The environment variables of a command, besides those of the job without the launcher's."""
    found = {
        "HPCRL_EVENT": event["event"],
        "HPCRL_EVENT_RUN": event["run"],
        "HPCRL_EVENT_STEP": event["step"],
        "HPCRL_EVENT_FOLDER": event["folder"],
        "HPCRL_EVENT_MESSAGE": event["message"],
        "HPCRL_EVENT_JSON": line,
    }
    return {name: str(value).replace("\0", "") for name, value in found.items()}


def sentence(event: dict[str, Any]) -> str:
    """One line about an event, for a person."""
    run, step, total = event["run"], event["step"], event.get("total_steps")
    of_steps = f"step {step} of {total}" if total is not None else f"step {step}"
    why = " ".join(str(event.get("reason") or event.get("error") or "").split())[:LONGEST_TEXT]
    text = {
        "started": f"{run} started: {of_steps}" if not step else f"{run} continues after {of_steps}",
        "saved": f"{run} has saved {of_steps}",
        "left": f"{run} stopped after {of_steps}, to be continued",
        "done": f"{run} is done: {of_steps}",
        "hang": f"{run} hangs after {of_steps}",
        "failed": f"{run} failed after {of_steps}",
    }[event["event"]]
    return f"{text}: {why}" if why else text


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
        """Report an event. Does not wait.

        Args:
            details: what the commands are given about it, as JSON.
        """
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
    record = run_dir / RECORD_FILE
    exits.before_kill(partial(_wait_for_end, record, _size(record)))
    return Events.start(run_dir, commands) if rank == 0 else Events()


def _wait_for_end(record: Path, start: int) -> None:
    """Wait until the commands of the run's end have run, END_SECONDS at most: a launcher may kill them with the job.

    Args:
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
