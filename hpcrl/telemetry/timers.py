"""Seconds and bytes per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


def _no_announcement(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class PhaseTimers:
    """Adds up what phases of a step took: `with timers("gen"): ...`.

    Phases may nest and repeat; an outer phase includes its inner ones. Bytes go under `perf/`, because they, like
    times, may differ between two runs that are otherwise equal.

    `longest`: seconds of the longest one of each phase so far. `announce(name)` surrounds each phase.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        announce: Callable[[str], AbstractContextManager[None]] = _no_announcement,
    ) -> None:
        self.longest: dict[str, float] = {}
        self._clock = clock
        self._announce = announce
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            with self._announce(name):
                yield
        finally:
            seconds = self._clock() - start
            self.took(name, seconds)
            self.add_seconds(name, seconds)

    def took(self, name: str, seconds: float) -> None:
        """Count towards `longest` only: for a phase that ran beside others, without a wait for it."""
        self.longest[name] = max(seconds, self.longest.get(name, 0.0))

    def add_seconds(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add_bytes(self, name: str, count: int) -> None:
        self._bytes[name] = self._bytes.get(name, 0) + count

    def collect(self) -> dict[str, float]:
        """`timing_s/<name>` in seconds and `perf/bytes/<name>` since the last call, which it forgets."""
        metrics: dict[str, float] = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics.update({f"perf/bytes/{name}": count for name, count in self._bytes.items()})
        self._seconds, self._bytes = {}, {}
        return metrics
