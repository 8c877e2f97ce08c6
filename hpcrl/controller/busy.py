"""A rank's phases: time at work without the time that it waited for other ranks, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from hpcrl.runtime import accelerator
from hpcrl.runtime.mpi import WaitTime
from hpcrl.runtime.spans import spans


class MemoryUse(NamedTuple):
    """Bytes. allocated, reserved: the peaks of torch's allocator on the device, 0 on the CPU. host: the process's
    resident memory at the end of the phase, or of a phase inside it."""

    allocated: int = 0
    reserved: int = 0
    host: int = 0

    def or_more(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(max, self, other))


class MemoryLedger:
    """Records the peak memory of each phase. device: returns the first two of a `MemoryUse`, since its last call."""

    def __init__(self, device: Callable[[], tuple[int, int]] | None = None) -> None:
        self._device = device or accelerator.take_peak_bytes
        self._process = psutil.Process()
        self._so_far = MemoryUse()  # of the current phase, up to the end of its last inner one
        self._used: dict[str, MemoryUse] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase. Phases may nest; the peak of an inner one counts for its outer ones too."""
        outer = self._so_far.or_more(self._take())
        self._so_far = MemoryUse()
        yield
        now = self._take()
        spans.add_counter("memory host", now.host)
        if now.allocated:
            spans.add_counter("memory allocated", now.allocated)
        own = self._so_far.or_more(now)
        self._used[name] = own.or_more(self._used.get(name, MemoryUse()))
        self._so_far = outer.or_more(own)

    def collect(self) -> dict[str, MemoryUse]:
        """Peaks by phase since the last call, of phases that have ended; the maximum over phases of one name."""
        found, self._used = self._used, {}
        return found

    def _take(self) -> MemoryUse:
        return MemoryUse(*self._device(), self._process.memory_info().rss)


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
