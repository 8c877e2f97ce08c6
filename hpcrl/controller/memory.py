"""What a rank's phases take of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from hpcrl.runtime import accelerator


class MemoryUse(NamedTuple):
    """Bytes: what torch had allocated on the device and reserved there at most, 0 on the CPU; and the process's
    resident memory, as the phase ended or one inside it."""

    allocated: int = 0
    reserved: int = 0
    host: int = 0

    def or_more(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(max, self, other))


class MemoryLedger:
    """device: gives the first two of a `MemoryUse`, since it was asked last."""

    def __init__(self, device: Callable[[], tuple[int, int]] | None = None) -> None:
        self._device = device or accelerator.take_peak_bytes
        self._process = psutil.Process()
        self._so_far = MemoryUse()  # of the phase that goes on, before the inner one that ended last
        self._used: dict[str, MemoryUse] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Phases may nest: what an inner one takes, its outer one takes, too."""
        outer = self._so_far.or_more(self._take())
        self._so_far = MemoryUse()
        yield
        own = self._so_far.or_more(self._take())
        self._used[name] = own.or_more(self._used.get(name, MemoryUse()))
        self._so_far = outer.or_more(own)

    def collect(self) -> dict[str, MemoryUse]:
        """Since the last call, of phases that have ended; the most of those of one name."""
        found, self._used = self._used, {}
        return found

    def _take(self) -> MemoryUse:
        return MemoryUse(*self._device(), self._process.memory_info().rss)
