"""Generation one step ahead: while a step trains, the next one's samples are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.runtime.exits import InputError
from hpcrl.trainer.experience import BetweenSteps, Collected, Experience
from hpcrl.trainer.pending import Pending, Steps
from hpcrl.trainer.prompt_groups import numbered
from hpcrl.trainer.run import with_nan, without_nan

log = logging.getLogger(__name__)

T = TypeVar("T")


class OneStepOff(Experience):
    """Step k trains on samples that the weights of step k - 2 have drawn; step 1 on those of the start weights.

    What is drawn depends on nothing that takes time, so a resumed run has the numbers of an unbroken one: a checkpoint
    holds the samples of the step that comes next.
    """

    can_repeat = False
    # Of the step after the one that `collect` gave. It gives None where the run ends before that step, see `_spare`.
    ahead: Pending[Collected | None] | None = None

    def collect(self, step: int) -> Collected:
        found = (self.ahead or self._begin(step)).get()
        assert found is not None
        self.weights.bring(step - 1)
        # After the last step, only for a checkpoint from which more steps may follow.
        goes_on = step < self.total_steps or self.config.trainer.save_freq > 0
        self.ahead = self._begin(step + 1) if goes_on else None
        return found

    def updated(self, step: int) -> None:
        """The weights of `step` wait until the samples of the next one are there: see `collect`."""

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        if self.ahead is not None:
            self.ahead.get()
        self.weights.bring(step)
        yield

    def save(self, folder: Path, step: int, kept: BetweenSteps) -> dict[str, Any]:
        found = self.ahead.get() if self.ahead is not None else None
        kept = self.between_steps()  # the sampler has gone on
        if found is None:
            return super().save(folder, step, kept)
        batch, metrics = found
        self.write(batch, folder / "ahead", step + 1)
        return super().save(folder, step, kept) | {"ahead": without_nan(metrics)}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        super().load(state, folder, step)
        if "ahead" in state:  # not in a checkpoint of another mode
            batch = self.completed(numbered(self.read(folder / "ahead", step + 1), step + 1))
            self.ahead = Pending(_done((batch, with_nan(state["ahead"]))), self.timers)

    def _begin(self, step: int) -> Pending[Collected | None]:
        steps = self.gather(step) if step <= self.total_steps else self._spare(step)
        return Pending(steps, self.timers).in_background(self.controller)

    def _spare(self, step: int) -> Steps[Collected | None]:
        """As `gather`, of the step after the last one: a run without that step does not end for want of its samples."""
        try:
            return (yield from self.gather(step))
        except InputError as error:
            log.warning("no samples for a step after the last one: %s", error)
            return None


def _done(value: T) -> Steps[T]:
    yield from ()
    return value
