"""The steps of a run of which every rank writes a trace: `trainer.profile_steps`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.controller.controller import Controller, Future

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class ProfiledSteps:
    """Lives on rank 0. `with profiled(step): ...` surrounds each step.

    folder: of the run. waits: whether a step ends only when all its traces are written.
    """

    def __init__(self, controller: Controller, folder: Path, steps: Collection[int], *, waits: bool) -> None:
        self._controller = controller
        self._folder = folder / PROFILE_FOLDER
        self._steps = frozenset(steps)
        self._waits = waits
        self._written: deque[tuple[int, Future[list[str | None]]]] = deque()

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        self._report()
        if step not in self._steps:
            yield
            return
        self._controller.begin_profile()
        try:
            yield
        except GeneratorExit:  # the step is stopped, and the next slice does the whole of it
            self._controller.end_profile(None)
            raise
        self._written.append((step, self._controller.end_profile(str(self._stem(step)))))
        self._report()

    def close(self) -> None:
        """Wait for the traces that are still to be written."""
        self._waits = True
        self._report()

    def _stem(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}"

    def _report(self) -> None:
        """Log where the traces of a step are, or a warning that some are missing."""
        while self._written and (self._waits or self._written[0][1].is_ready):
            step, written = self._written.popleft()
            outcomes = written.get()
            failed = {rank: why for rank, why in enumerate(outcomes) if why is not None}
            if len(failed) < len(outcomes):
                log.info("profile of step %d: %s_rank_*.json.gz", step, self._stem(step))
            if failed:
                rank, why = next(iter(failed.items()))
                log.warning(
                    "%d of the traces of step %d could not be written; training continues without them; rank %d: %s",
                    *(len(failed), step, rank, why),
                )
