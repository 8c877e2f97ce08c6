"""Progress of long loops, seconds and bytes per phase of a step, and lines about validation and long phases."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import fmean
from typing import TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

MEAN = re.compile(r"val-core/(?P<source>.+)/(?P<metric>[^/]+/mean@\d+)")  # a source's name may have slashes


class PhaseTimers:
    """Sums the time of each phase of a step: `with timers("gen"): ...`.

    Phases may nest and repeat; an outer phase includes its inner ones. Bytes are under `perf/`, because they, like
    times, may differ between two runs that are otherwise equal.

    `longest`: seconds of the longest occurrence of each phase so far. `announce(name)` is a context around each phase.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        announce: Callable[[str], AbstractContextManager[object]] = nullcontext,
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
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def took(self, name: str, seconds: float) -> None:
        """Update `longest` only: for a phase that ran at the same time as others."""
        self.longest[name] = max(seconds, self.longest.get(name, 0.0))

    def add_bytes(self, name: str, count: int) -> None:
        self._bytes[name] = self._bytes.get(name, 0) + count

    def collect(self) -> dict[str, float]:
        """Return and reset `timing_s/<name>` in seconds and `perf/bytes/<name>` since the last call."""
        metrics: dict[str, float] = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics.update({f"perf/bytes/{name}": count for name, count in self._bytes.items()})
        self._seconds, self._bytes = {}, {}
        return metrics


class LongPhases:
    """Logs phases that take long: `with long_phases("gen"): ...`, in one thread at a time.

    The first line is due after `after_s` seconds, but not before twice the longest occurrence so far; each further one
    when the time has doubled. A phase within another one is the one that is logged.

    Args:
        longest: seconds of the longest occurrence of each phase.
        step: the number of the current step.
    """

    def __init__(
        self,
        longest: Mapping[str, float],
        step: Callable[[], int],
        after_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._longest, self._step, self._after_s, self._clock = longest, step, after_s, clock
        self._current: tuple[str, float] | None = None  # phase, begin
        self._logged: tuple[tuple[str, float], float] | None = None  # the phase of the last line, its seconds then
        self._ended = threading.Event()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer, self._current = self._current, (phase, self._clock())
        try:
            yield
        finally:
            self._current = outer

    def start(self) -> None:
        """Start the thread that logs."""
        threading.Thread(target=self._log_lines, name="long phases", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def line(self) -> str | None:
        """The line that is due, if one is."""
        current = self._current
        if current is None or current[0] == "step":  # which contains the others
            return None
        phase, begin = current
        seconds, longest = self._clock() - begin, self._longest.get(phase, 0.0)
        before = self._logged[1] if self._logged is not None and self._logged[0] == current else longest
        if seconds < max(self._after_s, 2 * before):
            return None
        self._logged = (current, seconds)
        compared = f"; the longest before took {duration(longest)}" if longest else ""
        return f"step {self._step()}: {phase} has run for {duration(seconds)}{compared}"

    def _log_lines(self) -> None:
        while not self._ended.wait(1.0):
            if line := self.line():
                log.info("%s", line)


class Progress:
    """Progress bar on a terminal, log lines elsewhere. `first` is the first step of this process, so that a resumed
    run's ETA counts only its own steps. `unit` names what is counted, a step by default.

    A log gets at most one line per `every_s` seconds, and always one for the first and for the last step.
    """

    def __init__(
        self,
        total: int,
        label: str,
        first: int = 1,
        *,
        unit: str = "step",
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._label, self._first, self._unit = total, label, first, unit
        self._stream = sys.stderr if stream is None else stream
        self._every_s, self._clock = every_s, clock
        self._start = clock()
        self._last_line: float | None = None
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total, initial=first - 1, desc=label, unit=unit, file=self._stream, dynamic_ncols=True
            )

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report step `step` as done. `metrics` are a few numbers to show, by a short name."""
        shown = {name: f"{value:.4g}" for name, value in (metrics or {}).items()}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._line_is_due(step):
            seconds = (self._clock() - self._start) / max(step - self._first + 1, 1)
            parts = [f"{self._label} {step}/{self._total}", f"{seconds:.3g} s/{self._unit}"]
            parts.append(f"ETA {duration(seconds * (self._total - step))}")
            parts += [f"{name} {value}" for name, value in shown.items()]
            with suppress(BrokenPipeError):  # a reader that has ended, such as `tee`, does not end the run
                print(" | ".join(parts), file=self._stream, flush=True)
            self._last_line = self._clock()

    def _line_is_due(self, step: int) -> bool:
        if self._last_line is None or step >= self._total:
            return True
        return self._clock() - self._last_line >= self._every_s

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def validation_means(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Metric, such as acc/mean@4, -> data source -> value; both in alphabetical order."""
    means: dict[str, dict[str, float]] = {}
    for name in sorted(metrics):
        if tag := MEAN.fullmatch(name):
            means.setdefault(tag["metric"], {})[tag["source"]] = metrics[name]
    return dict(sorted(means.items()))


def validation_lines(metrics: Mapping[str, float]) -> list[str]:
    """The mean over data sources, then a line for each source; one line if there is one source."""
    means = validation_means(metrics)
    sources = sorted({source for of_sources in means.values() for source in of_sources})
    rows = [(name, {metric: by[name] for metric, by in means.items() if name in by}) for name in sources]
    if len(sources) > 1:
        rows.insert(0, (f"mean of {len(sources)} data sources", {m: fmean(by.values()) for m, by in means.items()}))
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"{name:<{width}}  {', '.join(f'{metric} {value:.3f}' for metric, value in row.items())}" for name, row in rows
    ]


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h00m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
