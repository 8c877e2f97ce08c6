"""Ranges of a trace around what megatron's schedules do with each micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hpcrl.runtime.accelerator import annotated


class MegatronRanges:
    """Replacement of megatron's timers (`config.timers`) that opens a profiler range where a timer would run, with its
    name.

    The schedules start and stop 'forward-compute' and 'backward-compute' once per micro-batch, and 'forward-recv' and
    similar timers for each transfer between pipeline stages.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Range:
        if name not in self._ranges:
            self._ranges[name] = _Range(name)
        return self._ranges[name]


class _Range:
    def __init__(self, name: str) -> None:
        self._name = name
        self._open: AbstractContextManager[object] | None = None

    def start(self, barrier: bool = False) -> None:
        self._open = annotated(self._name)
        self._open.__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
