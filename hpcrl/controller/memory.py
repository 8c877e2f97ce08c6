"""Peak memory of a rank's phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from hpcrl.runtime import accelerator


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
        own = self._so_far.or_more(self._take())
        self._used[name] = own.or_more(self._used.get(name, MemoryUse()))
        self._so_far = outer.or_more(own)

    def collect(self) -> dict[str, MemoryUse]:
        """Peaks by phase since the last call, of phases that have ended; the maximum over phases of one name."""
        found, self._used = self._used, {}
        return found

    def _take(self) -> MemoryUse:
        return MemoryUse(*self._device(), self._process.memory_info().rss)
