"""A thread on each rank that says where the rank is, and that ends the job with a verdict when nobody gets on.

It uses files and `faulthandler`, never MPI and never the main thread, which may be what hangs. The lowest rank whose
watchdog runs is the judge, so that it does not matter which rank is stuck or stopped.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol, TextIO

from hpcrl.runtime import exits, rank_status
from hpcrl.runtime.hang_report import Verdict, is_due, judge, report
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.mpi import waited
from hpcrl.runtime.rank_status import Heartbeat, Peers, RankStatus, Sighting
from hpcrl.sandbox import fork_server

log = logging.getLogger(__name__)

STRAGGLERS_FILE = "stragglers.jsonl"  # in the run's folder: a line for each rank that stood out as slow
STALE_BEATS = 4  # a record that has not been renewed for so many intervals is of a process that does not run
NEIGHBOURS = 16  # ranks that are looked at together, once rank 0's watchdog is known not to run
WARY = 4  # a rank looks at others from a fourth of min_seconds on: how long one has stopped shows by looking
ASKING, TOLD = 1, 2  # Heartbeat.judging
LONGEST_REPORT = 60.0  # seconds that a rank waits for the judge's verdict
POLL = 0.1  # seconds
SECONDS_TO_REPORT = 1.0  # launchers drop what is still in their pipes when the first rank leaves


class Patience(Protocol):
    """`run.watchdog`; hpcrl.config.schema has it."""

    @property
    def enable(self) -> bool: ...
    @property
    def publish_seconds(self) -> float: ...
    @property
    def min_seconds(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def first_seconds(self) -> float: ...


def start(run_dir: Path, rank: int, size: int, status: RankStatus, patience: Patience) -> None:
    """Start this rank's watchdog, which lasts as long as the process."""
    if not patience.enable:
        return
    folder = run_dir / rank_status.FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    watchdog = Watchdog(run_dir, rank, size, status, patience)
    watchdog.publish()
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()


class Clock:
    """Seconds in which this thread has run. A thread that was held up, as by a file system that did not answer or by
    SIGSTOP, knows nothing of that time, which must not count as silence of others."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = 2 * interval
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def now(self) -> float:
        last, self._last = self._last, self._clock()
        self._now += min(self._last - last, self._most)
        return self._now


class Silence:
    """How long a rank has not got on, and how long it may.

    In a phase that has come to its end before: `factor` times the longest silence seen in it, `min_seconds` at least.
    In another one, which may compile, read or connect for the first time: `first_seconds`. Who waits for other ranks
    is not asked for patience of its own: those it waits for are.

    A thread that writes a checkpoint ends the rank's silence too, as all may wait for it, but it does not make the
    phase any quicker.
    """

    def __init__(self, status: RankStatus, patience: Patience) -> None:
        self._status = status
        self._patience = patience
        self._longest: dict[str, float] = {}  # "role.phase" -> seconds
        self._mark = self._progress()
        self._since = 0.0
        self._beside, self._beside_since = status.beside, 0.0

    def seconds(self, now: float) -> float:
        """Of silence until `now`."""
        mark = self._progress()
        if mark != self._mark:
            name = self._mark[0]
            self._longest[name] = max(self._longest.get(name, 0.0), now - self._since)
            self._mark, self._since = mark, now
        if (beside := self._status.beside) != self._beside:
            self._beside, self._beside_since = beside, now
        return now - max(self._since, self._beside_since)

    def allowed(self, waiting_s: float) -> float:
        """Seconds, to one who has waited so long for other ranks."""
        cfg, name = self._patience, self._status.name
        if waiting_s >= cfg.min_seconds:
            return cfg.min_seconds
        if name not in self._status.ended:
            return max(cfg.first_seconds, cfg.min_seconds)
        return max(cfg.factor * self._longest.get(name, 0.0), cfg.min_seconds)

    def _progress(self) -> tuple[str, int, int]:
        here = self._status
        return here.name, here.switches, here.ticks


class Watchdog:
    def __init__(self, run_dir: Path, rank: int, size: int, status: RankStatus, patience: Patience) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / rank_status.FOLDER
        self._rank = rank
        self._size = size
        self._here = status
        self._patience = patience
        self._interval = patience.publish_seconds
        self._clock = Clock(self._interval)
        self._silence = Silence(status, patience)
        self._peers = Peers(self._folder, STALE_BEATS * self._interval)
        self._beat = 0
        self._judging = 0
        self._has_dumped = False
        self._stacks: TextIO = open(rank_status.stacks_path(self._folder, rank), "w", encoding="utf-8")

    def run(self) -> None:
        while True:
            time.sleep(self._interval)
            try:
                self._look_around()
            except OSError as error:  # a file system that is full or away for a while
                log.warning("the watchdog cannot use %s: %s", self._folder, error.strerror)

    def publish(self) -> Heartbeat:
        """This rank's record, renewed."""
        self._beat += 1
        here, since = self._here, waited.since
        waiting = time.perf_counter() - since if since is not None else 0.0
        record = Heartbeat(
            rank=self._rank,
            host=node_name(),
            pid=os.getpid(),
            role=here.role,
            phase=here.phase,
            step=here.step,
            command=here.command,
            ticks=here.ticks,
            beat=self._beat,
            silent_s=self._silence.seconds(self._clock.now()),
            waiting_s=waiting,
            patience_s=self._silence.allowed(waiting),
            judging=self._judging,
            has_dumped=self._has_dumped,
        )
        rank_status.write(self._folder, record)
        return record

    def _look_around(self) -> None:
        record = self.publish()
        # C code that keeps the interpreter's lock stops this thread too; then the stacks come from a thread without it.
        faulthandler.dump_traceback_later(self._patience.min_seconds / 2, file=self._stacks)
        if record.silent_s < self._patience.min_seconds / WARY:
            self._peers.forget()
            return
        chief = self._chief()
        if chief is None:
            self._judge()
        elif chief.record is not None and chief.record.judging:
            self._obey(chief.rank)

    def _chief(self) -> Sighting | None:
        """The lowest rank before this one whose watchdog runs, as one does that was never looked at."""
        now, first, count = self._clock.now(), 0, 1
        while first < self._rank:
            seen = self._peers.look(range(first, min(first + count, self._rank)), now)
            running = [sighting for sighting in seen if not sighting.is_stale]
            if running:
                return running[0]
            first, count = first + count, NEIGHBOURS
        return None

    def _everyone(self) -> list[Sighting]:
        return self._peers.look(range(self._size), self._clock.now())

    def _judge(self) -> None:
        patience = max(self._patience.first_seconds, self._patience.min_seconds)
        if not is_due(self._everyone(), patience):
            return
        log.error("nobody gets on: asking all ranks for their stacks")
        self._dump(ASKING)
        give_up = time.monotonic() + STALE_BEATS * self._interval + SECONDS_TO_REPORT
        while time.monotonic() < give_up and not all(s.is_stale or _has_dumped(s) for s in self._everyone()):
            time.sleep(POLL)
            self.publish()
        sightings = self._everyone()
        if is_due(sightings, patience):
            self._end(judge(sightings))
        self._withdraw()

    def _obey(self, chief: int) -> None:
        """Give the judge this rank's stacks, and leave once it has given its verdict, unless it thinks better of it."""
        self._dump(0)
        give_up = time.monotonic() + LONGEST_REPORT
        while time.monotonic() < give_up:
            record = rank_status.read(self._folder, chief)
            if record is not None and record.judging == TOLD:
                _leave(2 * SECONDS_TO_REPORT)
            if record is not None and not record.judging:
                break
            time.sleep(POLL)
            self.publish()
        self._withdraw()

    def _dump(self, judging: int) -> None:
        self._stacks.truncate(0)
        self._stacks.seek(0)
        faulthandler.dump_traceback(self._stacks)
        self._judging, self._has_dumped = judging, True
        self.publish()

    def _withdraw(self) -> None:
        log.warning("somebody has got on after all")
        self._judging, self._has_dumped = 0, False

    def _end(self, verdict: Verdict) -> NoReturn:
        stacks = {rank: self._stacks_of(rank) for rank in verdict.culprits}
        first = verdict.first
        role, phase = (first.role, first.phase) if first else (None, None)
        target = self._run_dir / "verdict.md"
        try:
            text = report(verdict, stacks, os.environ, time.ctime(), self._slow_before())
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            log.error("cannot write %s: %s", target, error.strerror)
        rank = verdict.culprits[0] if verdict.is_clear else None
        exits.write_exit(self._run_dir, exits.HANG, rank, role, phase, verdict.sentence)
        log.error("%s", verdict.sentence)
        os.write(2, f"hpcrl: hang: {verdict.sentence}; see {target}\n".encode(errors="replace"))
        self._judging = TOLD
        self.publish()
        _leave(SECONDS_TO_REPORT)

    def _slow_before(self) -> list[str]:
        try:
            return (self._run_dir / STRAGGLERS_FILE).read_text(encoding="utf-8").splitlines()[-5:]
        except OSError:
            return []

    def _stacks_of(self, rank: int) -> str:
        try:
            return rank_status.stacks_path(self._folder, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _has_dumped(sighting: Sighting) -> bool:
    return sighting.record is not None and sighting.record.has_dumped


def _leave(seconds: float) -> NoReturn:
    """Without MPI, as the main thread may be in it; the launcher ends the ranks that cannot leave by themselves."""
    time.sleep(seconds)
    fork_server.remove_files()
    os._exit(exits.HANG)
