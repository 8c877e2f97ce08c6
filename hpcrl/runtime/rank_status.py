"""What each rank is doing: its status in memory, and `<run>/heartbeat/rank_00003`, which its watchdog rewrites.

A heartbeat is a file and not a message, because it can still be read when MPI hangs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcrl.sandbox.foreign_files import read_json

FOLDER = "heartbeat"  # below the run directory
BLOCK = 640  # bytes; each heartbeat overwrites the one before in one call
LONGEST_NAME = 64  # characters


@dataclass
class RankStatus:
    """What this rank is doing. The main thread changes it by plain assignments, and the watchdog's thread reads it.

    role: the role whose method runs; "controller" in rank 0's own program, None outside both. command: the command's
    number, None outside commands. ticks: micro-batches, or tokens of a generation, since the phase began. switches:
    phases begun or ended. background_ticks: progress of background threads, such as those that write a checkpoint.
    ended: phases that have ended at least once, as "role.phase".
    """

    role: str | None = None
    phase: str | None = None
    step: int = 0
    command: int | None = None
    ticks: int = 0
    switches: int = 0
    background_ticks: int = 0
    ended: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role or '-'}.{self.phase}"

    def tick(self) -> None:
        """Record progress of the phase."""
        self.ticks += 1

    def tick_background(self) -> None:
        """Record progress of a background thread. Two concurrent calls may count as one, which is harmless."""
        self.background_ticks += 1

    @contextmanager
    def within(self, role: str | None, phase: str, command: int | None = None) -> Iterator[None]:
        """Context in which this rank is in a phase; the status before is restored at its end, unless it raises."""
        outer = (self.role, self.phase, self.command, self.ticks)
        self.role, self.phase, self.command, self.ticks = role, phase, command, 0
        self.switches += 1
        yield
        self.ended.add(self.name)
        self.role, self.phase, self.command, self.ticks = outer
        self.switches += 1


@dataclass(frozen=True)
class Heartbeat:
    """The status of one rank at one time. Seconds are durations on the rank's own clock: clocks of nodes may differ.

    beat: number of this heartbeat. silent_s: since the rank's last progress. waiting_s: since when it waits for other
    ranks inside MPI, 0 if it does not. timeout_s: how long it may be silent in its phase. report_state: 0 none, 1 this
    rank leads a hang report and collects stack traces, 2 it has written the report. has_dumped: its stack traces are
    written.
    """

    rank: int
    host: str
    pid: int
    role: str | None
    phase: str | None
    step: int
    command: int | None
    ticks: int
    beat: int
    silent_s: float
    waiting_s: float
    timeout_s: float
    report_state: int = 0
    has_dumped: bool = False


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}"


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank:05d}.txt"


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Overwrite the file in place and close it: other nodes of a network file system see a file once it is closed."""
    entries = {k: v[:LONGEST_NAME] if isinstance(v, str) else v for k, v in asdict(heartbeat).items()}
    block = json.dumps(entries).encode().ljust(BLOCK - 1) + b"\n"
    handle = os.open(heartbeat_path(folder, heartbeat.rank), os.O_WRONLY | os.O_CREAT, 0o640)
    try:
        os.pwrite(handle, block, 0)
    finally:
        os.close(handle)


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """A rank's last heartbeat, or None if there is no file or only a part of one."""
    try:
        return Heartbeat(**read_json(heartbeat_path(folder, rank), most=2 * BLOCK))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class PeerStatus:
    """A rank as seen by another one. heartbeat: its last one, None if it has never written one. age_s: seconds since
    this heartbeat was new, on the reader's clock. is_stale: the rank no longer writes heartbeats."""

    rank: int
    heartbeat: Heartbeat | None
    age_s: float
    is_stale: bool

    @property
    def silent_s(self) -> float:
        return (self.heartbeat.silent_s if self.heartbeat else 0.0) + self.age_s


class Peers:
    """Reads the other ranks' heartbeats, and measures their age by this rank's own clock."""

    def __init__(self, folder: Path, stale_after_s: float) -> None:
        self._folder = folder
        self._stale_after_s = stale_after_s
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}  # last heartbeat, and when it was new

    def read(self, ranks: Iterable[int], now: float) -> list[PeerStatus]:
        """Status of each rank. A heartbeat that is read for the first time counts as new."""
        return [self._read_one(rank, now) for rank in ranks]

    def forget(self) -> None:
        self._seen.clear()

    def _read_one(self, rank: int, now: float) -> PeerStatus:
        found = read_heartbeat(self._folder, rank)
        last, since = self._seen.get(rank, (None, now))
        if found is not None and (last is None or (found.pid, found.beat) != (last.pid, last.beat)):
            last, since = found, now
        self._seen[rank] = last, since
        age = now - since
        return PeerStatus(rank, last, age, age > self._stale_after_s)
