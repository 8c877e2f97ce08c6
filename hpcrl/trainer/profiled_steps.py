"""The steps of a run of which every rank writes a trace: `trainer.profile_steps`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.controller.controller import Controller, Future
from hpcrl.trainer.slice import Leave

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class ProfiledSteps:
    """Lives on rank 0. `with profiled(step): ...` surrounds each step.

    folder: of the run. waits: for the traces to be written; else a rank may do so later, inside a method that goes on.
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
        except Leave:  # the next slice does the whole step
            self._controller.end_profile(None)
            raise
        stem = self._folder / f"step_{step:08d}"
        self._written.append((step, self._controller.end_profile(str(stem))))
        log.info("profile of step %d: %s_rank_*.json.gz", step, stem)
        self._report()

    def _report(self) -> None:
        """A warning for each step of which a trace is missing."""
        while self._written and (self._waits or self._written[0][1].is_ready):
            step, written = self._written.popleft()
            failed = {rank: why for rank, why in enumerate(written.get()) if why is not None}
            if failed:
                rank, why = next(iter(failed.items()))
                log.warning(
                    "%d of the traces of step %d could not be written; training continues without them; rank %d: %s",
                    *(len(failed), step, rank, why),
                )
