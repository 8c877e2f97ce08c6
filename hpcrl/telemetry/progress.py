"""Progress of a long loop: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm


class Progress:
    """`first` is the step that comes first in this process, so that a resumed run's ETA counts only its own steps.
    A step may be another `unit`, many at once.

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
        """Step `step` is done. `metrics` are the few numbers worth a glance, by a short name."""
        shown = {name: f"{value:.4g}" for name, value in (metrics or {}).items()}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._line_is_due(step):
            seconds = (self._clock() - self._start) / max(step - self._first + 1, 1)
            parts = [f"{self._label} {step}/{self._total}", f"{seconds:.3g} s/{self._unit}"]
            parts.append(f"ETA {duration(seconds * (self._total - step))}")
            parts += [f"{name} {value}" for name, value in shown.items()]
            print(" | ".join(parts), file=self._stream, flush=True)
            self._last_line = self._clock()

    def _line_is_due(self, step: int) -> bool:
        if self._last_line is None or step >= self._total:
            return True
        return self._clock() - self._last_line >= self._every_s

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h00m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
