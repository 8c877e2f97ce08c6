"""Work of the loop that goes on while rank 0 waits for something else."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeAlias, TypeVar

from hpcrl.controller.controller import Controller, Future
from hpcrl.telemetry.timers import PhaseTimers

T = TypeVar("T")

# Asks for one future after the other, each with the name of the phase that waits for it, and is given their values.
Steps: TypeAlias = Generator[tuple[str, Future[Any]], Any, T]


class Pending(Generic[T]):
    """Steps under way. They begin at once; `in_background` lets them go on whenever rank 0 waits.

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

    def in_background(self, controller: Controller) -> Pending[T]:
        controller.background = self.go_on
        return self

    def go_on(self) -> None:
        """As far as that is possible without waiting."""
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
