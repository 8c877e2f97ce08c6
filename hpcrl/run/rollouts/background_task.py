"""A task of the controller that advances while rank 0 waits for something else."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeAlias, TypeVar

from hpcrl.controller.controller import Controller, Future
from hpcrl.observe.record.progress import PhaseTimers

T = TypeVar("T")

# Yields one future after the other, each with the name of the phase that waits for it, and is sent their values.
Steps: TypeAlias = Generator[tuple[str, Future[Any]], Any, T]


class BackgroundTask(Generic[T]):
    """Runs a generator of futures. It begins at once; with `in_background` it advances whenever rank 0 waits.

    Only `get` waits, and only its waiting counts as time of a phase.
    """

    def __init__(self, steps: Steps[T], timers: PhaseTimers) -> None:
        self._steps = steps
        self._timers = timers
        self._phase = ""
        self._future: Future[Any] | None = None
        self._is_stepping = False
        self._value: T
        self._step(None)

    def in_background(self, controller: Controller) -> BackgroundTask[T]:
        controller.background = self.advance
        return self

    def advance(self) -> None:
        """Run as far as possible without waiting."""
        while not self._is_stepping and self._future is not None and self._future.is_ready:
            self._step(self._future.get())

    def get(self) -> T:
        while self._future is not None:
            with self._timers(self._phase):
                value = self._future.get()
            self._step(value)
        return self._value

    def _step(self, value: Any) -> None:
        self._is_stepping = True
        try:
            self._phase, self._future = self._steps.send(value)
        except StopIteration as end:
            self._future, self._value = None, end.value
        finally:
            self._is_stepping = False
