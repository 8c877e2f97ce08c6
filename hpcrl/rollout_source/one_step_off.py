"""Generation one step ahead: while a step trains, the next one's samples are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hpcrl.batch.data_proto import DataProto
from hpcrl.rollout_source.background_task import BackgroundTask, Steps
from hpcrl.rollout_source.prompt_groups import numbered
from hpcrl.rollout_source.source import Collected, RolloutContext, RolloutState, SamplePool
from hpcrl.rollout_source.synchronous import StepGenerator
from hpcrl.runtime.exits import InputError
from hpcrl.telemetry.writer import with_nan, without_nan

log = logging.getLogger(__name__)

T = TypeVar("T")


class OneStepOff:
    """Step k trains on samples that the weights of step k - 2 have drawn; step 1 on those of the start weights.

    What is drawn does not depend on timing, so a resumed run has the numbers of an uninterrupted one: a checkpoint
    holds the samples of the step that comes next.
    """

    can_repeat: ClassVar[bool] = False

    def __init__(self, context: RolloutContext) -> None:
        self.context, self.weights = context, context.weights
        self.pool = SamplePool(context)
        self.generator = StepGenerator(context, self.pool)
        # Of the step after the one that `next` returned; its value is None if the run ends before it: see `_spare`.
        self.ahead: BackgroundTask[Collected | None] | None = None

    def next(self, step: int) -> DataProto:
        found = (self.ahead or self._begin(step)).get()
        assert found is not None
        self.weights.update_to(step - 1)
        # After the last step, only for a checkpoint from which more steps may follow.
        continues = step < self.context.total_steps or self.context.config.trainer.save_freq > 0
        self.ahead = self._begin(step + 1) if continues else None
        return self.context.deliver(found)

    def update_weights(self, step: int) -> None:
        """The engine gets the weights of `step` once the samples of the next one are drawn: see `next`."""

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        if self.ahead is not None:
            self.ahead.get()
        self.weights.update_to(step)
        yield

    def between_steps(self) -> RolloutState:
        return self.pool.state()

    def save(self, folder: Path, step: int, kept: RolloutState) -> dict[str, Any]:
        found = self.ahead.get() if self.ahead is not None else None
        kept = self.between_steps()  # the sampler has advanced
        if found is None:
            return self.pool.save(folder, step, kept)
        batch, metrics = found
        self.pool.write(batch, folder / "ahead", step + 1)
        return self.pool.save(folder, step, kept) | {"ahead": without_nan(metrics)}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.pool.load(state, folder, step)
        if "ahead" in state:  # not in a checkpoint of another mode
            batch = self.pool.complete(numbered(self.pool.read(folder / "ahead", step + 1), step + 1))
            self.ahead = BackgroundTask(_done((batch, with_nan(state["ahead"]))), self.context.timers)

    def _begin(self, step: int) -> BackgroundTask[Collected | None]:
        steps = self.generator.gather(step) if step <= self.context.total_steps else self._spare(step)
        return BackgroundTask(steps, self.context.timers).in_background(self.context.controller)

    def _spare(self, step: int) -> Steps[Collected | None]:
        """As `gather`, for the step after the last one: a run without that step does not fail for lack of samples."""
        try:
            return (yield from self.generator.gather(step))
        except InputError as error:
            log.warning("no samples for a step after the last one: %s", error)
            return None


def _done(value: T) -> Steps[T]:
    yield from ()
    return value
