"""A thread on each rank that writes heartbeats, and ends the job with a hang report when no rank makes progress.

It uses files and `faulthandler`, never MPI and never the main thread, because these may hang. The lowest rank whose
watchdog runs leads the report, so any rank may be the one that hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hpcrl.runtime import exits, rank_status, run_owner
from hpcrl.runtime.launcher import format_spans, node_name
from hpcrl.runtime.mpi import wait_time
from hpcrl.runtime.rank_status import Heartbeat, Peers, PeerStatus, RankStatus
from hpcrl.sandbox.foreign_files import ERRORS, printable, writable

LONGEST_STACKS = 20_000  # characters of one rank's stack traces in the report


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that cause a hang.

    culprits: the ranks that the others wait for, never empty. why: what they have in common, in words. is_clear: False
    if only some of them may be the cause, and the heartbeats do not show which.
    """

    ranks: tuple[PeerStatus, ...]
    culprits: tuple[int, ...]
    why: str
    is_clear: bool = True

    @property
    def first(self) -> Heartbeat | None:
        """The last heartbeat of the first culprit."""
        return self._of(self.culprits)[0].heartbeat

    @property
    def sentence(self) -> str:
        blamed = self._of(self.culprits)
        silent = min(peer.silent_s for peer in blamed)
        who = f"{format_ranks(self.culprits)} on {' and '.join(sorted(_hosts(blamed)))}"
        text = f"{who} {'is' if len(blamed) == 1 else 'are'} in {_places(blamed)}, no progress for {silent:.0f} s"
        if self.why:
            text += f", {self.why}"
        others = [peer for peer in self.ranks if peer.rank not in self.culprits]
        if others:
            what = "wait in" if all(_waits(peer) for peer in others) else "are in"
            text += f"; the other {len(others)} {what} {_places(others)}"
        return text

    @property
    def nodes(self) -> list[str]:
        """The culprits' nodes, to be excluded when the job is requeued; empty if all nodes have culprits."""
        blamed = _hosts(self._of(self.culprits))
        return sorted(blamed) if self.is_clear and blamed != _hosts(self.ranks) else []

    def _of(self, ranks: Iterable[int]) -> list[PeerStatus]:
        return [self.ranks[rank] for rank in ranks]


def is_hang(ranks: Sequence[PeerStatus], timeout_s: float) -> bool:
    """Whether all ranks have been silent for longer than the longest of their timeouts.

    Args:
        timeout_s: the timeout of a rank that has never written a heartbeat.
    """
    longest = max(peer.heartbeat.timeout_s if peer.heartbeat else timeout_s for peer in ranks)
    return min(peer.silent_s for peer in ranks) >= longest


def diagnose(ranks: Sequence[PeerStatus]) -> Diagnosis:
    """Find the ranks that the others wait for.

    1. Ranks whose heartbeat is stale: no Python runs there.
    2. Otherwise commands decide. A part of command k waits only for parts of k on other ranks, so the cause is among
       the ranks in the lowest command: those that do not wait inside MPI.

    Waits for a GPU's collective are not visible. So if no rank waits inside MPI, or the ticks of those that do not wait
    differ, any of them may be the cause: the last stage of a pipeline has fewer ticks than the stage it waits for.

    Args:
        ranks: all ranks, in their order.
    """
    everyone = tuple(ranks)
    stale = [peer for peer in everyone if peer.is_stale or peer.heartbeat is None]
    if stale:
        return _diagnosis(everyone, stale, "and not even its watchdog runs: stopped, killed, or its node is down")
    heartbeats = [peer.heartbeat for peer in everyone if peer.heartbeat is not None]
    commands = {beat.command for beat in heartbeats if beat.command is not None}
    first = [peer for peer, beat in zip(everyone, heartbeats, strict=True) if beat.command == min(commands, default=-1)]
    working = [peer for peer in first if not _waits(peer)]
    differ_in_ticks = len({peer.heartbeat.ticks for peer in working if peer.heartbeat}) > 1
    if len(working) > 1 and (len(working) == len(first) or differ_in_ticks):
        why = "and it is not clear which of them the others wait for: compare their stacks"
        return Diagnosis(everyone, tuple(peer.rank for peer in working), why, is_clear=False)
    if working:
        return _diagnosis(everyone, working, "")
    outside = [p for p, beat in zip(everyone, heartbeats, strict=True) if beat.command is None and not _waits(p)]
    if outside:
        return _diagnosis(everyone, outside, "")
    return _diagnosis(everyone, first or list(everyone), "each waiting for another one")


def render(
    diagnosis: Diagnosis, stacks: Mapping[int, str], environ: Mapping[str, str], when: str, slow: Sequence[str] = ()
) -> str:
    """The text of `verdict.md`.

    Args:
        stacks: stack traces by rank, as faulthandler writes them.
        when: the time of the report.
        slow: what was logged about slow ranks before.
    """
    first = diagnosis.first
    step = f"Step {first.step}. " if first else ""
    lines = [f"# Hang: {diagnosis.sentence}.", "", f"{step}The job was ended with exit code 86, {when}.", ""]
    lines += ["| rank | node | phase (role) | command | progress | silent | in MPI | |", "|" + "---|" * 8]
    mark = "**to blame**" if diagnosis.is_clear else "perhaps"
    lines += [_row(peer, mark if peer.rank in diagnosis.culprits else "") for peer in diagnosis.ranks]
    lines += ["", "## Stacks", ""]
    for rank in diagnosis.culprits:
        traces = stacks.get(rank)
        lines += [f"rank {rank}:" if traces else f"rank {rank}: no stack traces, because no Python runs there.", ""]
        lines += ["```", traces[:LONGEST_STACKS].rstrip(), "```", ""] if traces else []
    lines += ["The stack traces of all ranks that wrote them: `heartbeat/stacks_*.txt`.", ""]
    lines += ["## Slow before", "", "```", *slow, "```", ""] if slow else []
    lines += ["## What to do", "", _advice(diagnosis, environ), ""]
    return "\n".join(lines)


def _advice(diagnosis: Diagnosis, environ: Mapping[str, str]) -> str:
    text = "The run continues from its newest checkpoint when it is started again. "
    if not diagnosis.is_clear:
        return f"{text}It is not clear which rank is the cause: compare the stacks first."
    if not diagnosis.nodes:
        return text + "No single node is the cause: read the stacks first."
    nodes, job = ",".join(diagnosis.nodes), environ.get("SLURM_JOB_ID")
    if job is None:
        return text + f"If it hangs on {nodes} again, exclude the node (`sbatch --exclude={nodes}`)."
    return text + (
        f"To exclude {nodes}: `scontrol update JobId={job} ExcNodeList={nodes}` while the job is requeued, or "
        f"`sbatch --exclude={nodes}`."
    )


def _diagnosis(everyone: tuple[PeerStatus, ...], blamed: Sequence[PeerStatus], why: str) -> Diagnosis:
    if len(blamed) == len(everyone) > 1 and not why:
        why = "none of them in MPI; compare their stacks"
    return Diagnosis(everyone, tuple(peer.rank for peer in blamed), why)


def _waits(peer: PeerStatus) -> bool:
    return peer.heartbeat is not None and not peer.is_stale and peer.heartbeat.waiting_s > 0


def _hosts(peers: Iterable[PeerStatus]) -> set[str]:
    return {peer.heartbeat.host if peer.heartbeat else "?" for peer in peers}


def format_ranks(ranks: Sequence[int]) -> str:
    """'rank 5'; 'ranks 0, 3-5'"""
    return f"rank{'s' * (len(ranks) > 1)} {format_spans(sorted(ranks)).replace(',', ', ')}"


def _places(peers: Sequence[PeerStatus]) -> str:
    """'update_actor (actor), gen (controller)', the most frequent one first"""
    names = [_place(peer) for peer in peers]
    return ", ".join(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))


def _place(peer: PeerStatus) -> str:
    beat = peer.heartbeat
    if beat is None:
        return "an unknown phase"
    return f"{beat.phase} ({beat.role})" if beat.role else str(beat.phase)


def _row(peer: PeerStatus, mark: str) -> str:
    beat = peer.heartbeat
    if beat is None:
        return f"| {peer.rank} | ? | never reported | | | | | {mark} |"
    known = replace(beat, waiting_s=beat.waiting_s + peer.age_s) if _waits(peer) else beat
    waiting = f"waits {known.waiting_s:.0f} s" if _waits(peer) else ("no report" if peer.is_stale else "no")
    command = "" if beat.command is None else str(beat.command)
    cells = [peer.rank, beat.host, _place(peer), command, beat.ticks, f"{peer.silent_s:.0f} s", waiting]
    return "| " + " | ".join(map(str, [*cells, mark])) + " |"


log = logging.getLogger(__name__)

STRAGGLERS_FILE = "stragglers.jsonl"  # in the run directory: a line for each rank that was much slower than its peers
STALE_BEATS = 4  # a heartbeat that is older than this many intervals belongs to a process that does not run
NEIGHBOURS = 16  # ranks whose heartbeats are read at a time, if rank 0's watchdog does not run
EARLY = 4  # a rank reads the others' heartbeats from min_seconds / EARLY on, because their age is known only by reading
COLLECTING, WRITTEN = 1, 2  # Heartbeat.report_state
REPORT_TIMEOUT = 60.0  # seconds that a rank waits for the leader's report
POLL = 0.1  # seconds


def start(run_dir: Path, rank: int, size: int, status: RankStatus, limits: Any) -> None:
    """Start this rank's watchdog, a daemon thread that runs until the process ends.

    Args:
        limits: the config `run.watchdog`.
    """
    if not limits.enable:
        return
    folder = run_dir / rank_status.FOLDER
    folder.mkdir(exist_ok=True)
    watchdog = Watchdog(run_dir, rank, size, status, limits)
    watchdog.publish()
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()


class Clock:
    """Seconds in which this thread has run. Time in which it was suspended, as by SIGSTOP or by a file system that did
    not answer, must not count as silence of other ranks."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = 2 * interval
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def now(self) -> float:
        last, self._last = self._last, self._clock()
        self._now += min(self._last - last, self._most)
        return self._now


class ProgressTimer:
    """How long a rank has made no progress, and how long it may.

    The timeout of a phase that has ended before is `factor` times the longest silence in it so far, at least
    `min_seconds`. The timeout of a new phase, which may compile, read or connect, is `first_seconds`. A rank that waits
    for other ranks has no longer timeout of its own: theirs count.

    A background thread that writes a checkpoint ends the silence too, because all ranks may wait for it, but the
    longest silence of the phase does not depend on it.
    """

    def __init__(self, status: RankStatus, limits: Any) -> None:
        self._status = status
        self._limits = limits
        self._longest: dict[str, float] = {}  # "role.phase" -> seconds
        self._mark = self._progress()
        self._since = 0.0
        self._background, self._background_since = status.background_ticks, 0.0

    def silent_seconds(self, now: float) -> float:
        """Seconds from the last progress until `now`."""
        mark = self._progress()
        if mark != self._mark:
            name = self._mark[0]
            self._longest[name] = max(self._longest.get(name, 0.0), now - self._since)
            self._mark, self._since = mark, now
        if (background := self._status.background_ticks) != self._background:
            self._background, self._background_since = background, now
        return now - max(self._since, self._background_since)

    def timeout(self, waiting_s: float) -> float:
        """Seconds that the rank may be silent, if it has waited for other ranks for `waiting_s`."""
        cfg, name = self._limits, self._status.name
        if waiting_s >= cfg.min_seconds:
            return cfg.min_seconds
        if name not in self._status.ended:
            return max(cfg.first_seconds, cfg.min_seconds)
        return max(cfg.factor * self._longest.get(name, 0.0), cfg.min_seconds)

    def _progress(self) -> tuple[str, int, int]:
        status = self._status
        return status.name, status.switches, status.ticks


class Watchdog:
    def __init__(self, run_dir: Path, rank: int, size: int, status: RankStatus, limits: Any) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / rank_status.FOLDER
        self._rank = rank
        self._size = size
        self._status = status
        self._limits = limits
        self._interval = limits.publish_seconds
        self._clock = Clock(self._interval)
        self._progress = ProgressTimer(status, limits)
        self._peers = Peers(self._folder, STALE_BEATS * self._interval)
        self._beat = 0
        self._report_state = 0
        self._has_dumped = False
        self._stacks: TextIO = open(rank_status.stacks_path(self._folder, rank), "w", encoding="utf-8")

    def run(self) -> None:
        while True:
            time.sleep(self._interval)
            try:
                self._check()
            except OSError as error:  # the file system is full or unavailable for a while
                log.warning("the watchdog cannot use %s: %s", self._folder, error.strerror)

    def publish(self) -> Heartbeat:
        """Write this rank's heartbeat."""
        self._beat += 1
        status, since = self._status, wait_time.since
        waiting = time.perf_counter() - since if since is not None else 0.0
        heartbeat = Heartbeat(
            rank=self._rank,
            host=node_name(),
            pid=os.getpid(),
            role=status.role,
            phase=status.phase,
            step=status.step,
            command=status.command,
            ticks=status.ticks,
            beat=self._beat,
            silent_s=self._progress.silent_seconds(self._clock.now()),
            waiting_s=waiting,
            timeout_s=self._progress.timeout(waiting),
            report_state=self._report_state,
            has_dumped=self._has_dumped,
        )
        rank_status.write_heartbeat(self._folder, heartbeat)
        return heartbeat

    def _check(self) -> None:
        heartbeat = self.publish()
        # C code that holds the interpreter's lock stops this thread too; then a C thread writes the stack traces.
        faulthandler.dump_traceback_later(self._limits.min_seconds / 2, file=self._stacks)
        if heartbeat.silent_s < self._limits.min_seconds / EARLY:
            self._peers.forget()
            return
        leader = self._leader()
        if leader is None:
            self._lead()
        elif leader.heartbeat is not None and leader.heartbeat.report_state:
            self._follow(leader.rank)

    def _leader(self) -> PeerStatus | None:
        """The lowest rank below this one whose watchdog runs.

        A rank that is read for the first time counts as running.
        """
        now, first, count = self._clock.now(), 0, 1
        while first < self._rank:
            peers = self._peers.read(range(first, min(first + count, self._rank)), now)
            running = [peer for peer in peers if not peer.is_stale]
            if running:
                return running[0]
            first, count = first + count, NEIGHBOURS
        return None

    def _all_ranks(self) -> list[PeerStatus]:
        return self._peers.read(range(self._size), self._clock.now())

    def _lead(self) -> None:
        """End the job with a report if no rank has made progress within its timeout."""
        timeout = max(self._limits.first_seconds, self._limits.min_seconds)
        ranks = self._all_ranks()
        if not is_hang(ranks, timeout):
            return
        log.error("no rank made progress for %.0f s; collecting stack traces", min(peer.silent_s for peer in ranks))
        self._dump(COLLECTING)
        give_up = time.monotonic() + STALE_BEATS * self._interval + exits.SECONDS_TO_REPORT
        while time.monotonic() < give_up and not all(p.is_stale or _has_dumped(p) for p in self._all_ranks()):
            time.sleep(POLL)
            self.publish()
        ranks = self._all_ranks()
        if is_hang(ranks, timeout):
            self._end(diagnose(ranks))
        self._cancel()

    def _follow(self, leader: int) -> None:
        """Write this rank's stack traces, then exit once the leader has written its report, unless it cancels it."""
        self._dump(0)
        give_up = time.monotonic() + REPORT_TIMEOUT
        while time.monotonic() < give_up:
            heartbeat = rank_status.read_heartbeat(self._folder, leader)
            if heartbeat is not None and heartbeat.report_state == WRITTEN:
                exits.leave(exits.HANG, has_reported=False)
            if heartbeat is not None and not heartbeat.report_state:
                break
            time.sleep(POLL)
            self.publish()
        self._cancel()

    def _dump(self, report_state: int) -> None:
        self._stacks.truncate(0)
        self._stacks.seek(0)
        faulthandler.dump_traceback(self._stacks)
        self._report_state, self._has_dumped = report_state, True
        self.publish()

    def _cancel(self) -> None:
        log.warning("progress resumed; hang report cancelled")
        self._report_state, self._has_dumped = 0, False

    def _end(self, diagnosis: Diagnosis) -> NoReturn:
        run_owner.check()
        stacks = {rank: _text_of(rank_status.stacks_path(self._folder, rank)) for rank in diagnosis.culprits}
        slow = _text_of(self._run_dir / STRAGGLERS_FILE).splitlines()[-5:]
        first = diagnosis.first
        role, phase = (first.role, first.phase) if first else (None, None)
        target = self._run_dir / "verdict.md"
        try:
            text = render(diagnosis, stacks, os.environ, time.ctime(), slow)
            target.write_text(writable(text), encoding="utf-8")
        except OSError as error:
            log.error("cannot write %s: %s", target, error.strerror)
        rank = diagnosis.culprits[0] if diagnosis.is_clear else None
        exits.write_exit(self._run_dir, exits.HANG, rank, role, phase, diagnosis.sentence)
        log.error("%s", diagnosis.sentence)
        line = printable(f"hpcrl: hang: {diagnosis.sentence}; see {target}", one_line=True)
        os.write(2, f"{line}\n".encode(errors=ERRORS))
        self._report_state = WRITTEN
        self.publish()
        exits.leave(exits.HANG, has_reported=True)


def _text_of(path: Path) -> str:
    """The content, or "" if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _has_dumped(peer: PeerStatus) -> bool:
    return peer.heartbeat is not None and peer.heartbeat.has_dumped
