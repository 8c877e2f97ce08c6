"""How long a rank worked in each phase, without the time that it waited for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hpcrl.controller.memory import MemoryUse
from hpcrl.runtime.mpi import WaitTime


@dataclass(frozen=True)
class BusyReport:
    """seconds, memory: by "role.method", since the previous report. host_buffers: bytes that the workers keep."""

    rank: int
    node: str
    seconds: dict[str, float]
    memory: dict[str, MemoryUse] = field(default_factory=dict)
    host_buffers: int = 0


class BusyClock:
    """Measures host time. Time in which the host waits for its GPU, and the GPU for others inside NCCL's kernels,
    counts as work: in such a phase the slow ranks are the *less* busy ones, or all are equal.
    """

    def __init__(self, waited: WaitTime, clock: Callable[[], float] = time.perf_counter) -> None:
        self._waited = waited
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._booked = 0.0  # seconds in all

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. Phases may nest; an outer one does not contain the time of its inner ones."""
        began, booked = self._worked(), self._booked
        yield
        own = (self._worked() - began) - (self._booked - booked)
        self._seconds[name] = self._seconds.get(name, 0.0) + own
        self._booked += own

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call, of phases that have ended."""
        found, self._seconds = self._seconds, {}
        return found

    def _worked(self) -> float:
        now, since = self._clock(), self._waited.since
        return now - self._waited.seconds - (now - since if since is not None else 0.0)
