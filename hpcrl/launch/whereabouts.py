"""What this rank is doing, for those who ask when it fails or falls silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Whereabouts:
    """Changed by the main thread, by plain assignments: that costs it nothing. The watchdog's thread reads it.

    role: whose method runs; "controller" in rank 0's own program, None outside both. command: its number, None outside
    commands. ticks: micro-batches, or tokens of a generation, since the phase began. switches: phases begun or ended.
    beside: what threads have got done meanwhile, as they write a checkpoint; in no unit, and not of the phase.
    ended: phases that have come to their end once, as "role.phase".
    """

    role: str | None = None
    phase: str | None = None
    step: int = 0
    command: int | None = None
    ticks: int = 0
    switches: int = 0
    beside: int = 0
    ended: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role or '-'}.{self.phase}"

    def tick(self) -> None:
        """The phase gets on."""
        self.ticks += 1

    def tick_beside(self) -> None:
        """A thread other than the main one gets on. Two at once may count as one, which does no harm."""
        self.beside += 1

    @contextmanager
    def within(self, role: str | None, phase: str, command: int | None = None) -> Iterator[None]:
        """Inside it this rank is there; afterwards where it was before. An exception leaves it where it happened."""
        outer = (self.role, self.phase, self.command, self.ticks)
        self.role, self.phase, self.command, self.ticks = role, phase, command, 0
        self.switches += 1
        yield
        self.ended.add(self.name)
        self.role, self.phase, self.command, self.ticks = outer
        self.switches += 1
