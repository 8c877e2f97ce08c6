"""`<run>/heartbeat/rank_00003`: where a rank is and how it gets on, as one small block that its watchdog renews.

Files and not messages: they are still there, and can be read, when MPI is what hangs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = "heartbeat"  # in the run's
BLOCK = 640  # bytes; a record is written over the one before in one call
LONGEST_NAME = 64  # characters


@dataclass(frozen=True)
class Heartbeat:
    """One rank at one moment. Seconds are durations on the rank's own clock: clocks of nodes need not agree.

    beat: number of this record. silent_s: since it last got on. waiting_s: since when it waits for other ranks inside
    MPI, 0 when it does not. patience_s: how long it may be silent where it is. judging: 0 none, 1 this rank is about to
    give the verdict and asks for stacks, 2 it has given it. has_dumped: its stacks are written.
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
    patience_s: float
    judging: int = 0
    has_dumped: bool = False


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}"


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank:05d}.txt"


def write(folder: Path, record: Heartbeat) -> None:
    """In place, and closed each time: other nodes of a network file system see a file when it is closed."""
    entries = {k: v[:LONGEST_NAME] if isinstance(v, str) else v for k, v in asdict(record).items()}
    block = json.dumps(entries).encode().ljust(BLOCK - 1) + b"\n"
    handle = os.open(record_path(folder, record.rank), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(handle, block, 0)
    finally:
        os.close(handle)


def read(folder: Path, rank: int) -> Heartbeat | None:
    """None where there is no record, or half of one."""
    try:
        return Heartbeat(**json.loads(record_path(folder, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Sighting:
    """A rank as another one sees it. record: the last one, None if it has never written any. age_s: how long that has
    not been renewed, in the eyes of who looks."""

    rank: int
    record: Heartbeat | None
    age_s: float
    is_stale: bool

    @property
    def silent_s(self) -> float:
        return (self.record.silent_s if self.record else 0.0) + self.age_s


class Peers:
    """The other ranks' records, and how old they are by this rank's own clock."""

    def __init__(self, folder: Path, stale_after_s: float) -> None:
        self._folder = folder
        self._stale_after_s = stale_after_s
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}  # last record, and when it was new

    def look(self, ranks: Iterable[int], now: float) -> list[Sighting]:
        """A record that is seen for the first time counts as new."""
        return [self._look_at(rank, now) for rank in ranks]

    def forget(self) -> None:
        self._seen.clear()

    def _look_at(self, rank: int, now: float) -> Sighting:
        found = read(self._folder, rank)
        last, since = self._seen.get(rank, (None, now))
        if found is not None and (last is None or (found.pid, found.beat) != (last.pid, last.beat)):
            last, since = found, now
        self._seen[rank] = last, since
        age = now - since
        return Sighting(rank, last, age, age > self._stale_after_s)


@dataclass
class RankStatus:
    """Changed by the main thread, by plain assignments: that costs it nothing. The watchdog's thread reads it.

    role: whose method runs; "controller" in rank 0's own program, None outside both. command: its number, None outside
    commands. ticks: micro-batches, or tokens of a generation, since the phase began. switches: phases begun or ended.
    beside: what threads have got done meanwhile, as they write a checkpoint; in no unit, and not of the phase.
    ended: phases that have come to their end once, as "role.phase".
    """

    role: str | None = None
    phase: str | None = None
    step: int = 0
    command: int | None = None
    ticks: int = 0
    switches: int = 0
    beside: int = 0
    ended: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role or '-'}.{self.phase}"

    def tick(self) -> None:
        """The phase gets on."""
        self.ticks += 1

    def tick_beside(self) -> None:
        """A thread other than the main one gets on. Two at once may count as one, which does no harm."""
        self.beside += 1

    @contextmanager
    def within(self, role: str | None, phase: str, command: int | None = None) -> Iterator[None]:
        """Inside it this rank is there; afterwards where it was before. An exception leaves it where it happened."""
        outer = (self.role, self.phase, self.command, self.ticks)
        self.role, self.phase, self.command, self.ticks = role, phase, command, 0
        self.switches += 1
        yield
        self.ended.add(self.name)
        self.role, self.phase, self.command, self.ticks = outer
        self.switches += 1
