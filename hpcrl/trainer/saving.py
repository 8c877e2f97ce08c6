"""The checkpoints of a run, made while it goes on: a save that fails costs that checkpoint, not the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.retention import Retention
from hpcrl.checkpoint.sharded_save import SavedPart
from hpcrl.checkpoint.store import CheckpointStore
from hpcrl.config.schema import TrainerConfig
from hpcrl.controller.controller import Controller
from hpcrl.telemetry.timers import PhaseTimers

log = logging.getLogger(__name__)


@dataclass
class Save:
    """One that is under way. committed: once all ranks have written, the thread that makes it count; its seconds."""

    controller: Controller
    step: int
    roles: tuple[str, ...]
    state: dict[str, Any]
    metric: float | None
    seconds: float  # that it took so far, without those in which it waited for the loop
    committed: Future[float] | None = None

    def is_written(self) -> bool:
        calls = [self.controller[role].save_is_written() for role in self.roles]
        answers = [call.get() for call in calls]  # of all of them: an answer that nobody takes stays in memory
        return all(map(all, answers))

    def finish(self) -> list[SavedPart]:
        calls = [self.controller[role].finish_save() for role in self.roles]
        return [part for call in calls for part in call.get()]


class Saver:
    """Lives on rank 0. At most one save is under way; whatever calls MPI is done by the loop's own thread."""

    def __init__(self, trainer: TrainerConfig, root: Path, timers: PhaseTimers, saved_step: int | None = None) -> None:
        """`saved_step`: the newest one with a checkpoint."""
        self.saved_step = saved_step
        self._options = trainer.checkpoint
        self._timers = timers
        self._store = CheckpointStore(root, retention(trainer))
        self._under_way: Save | None = None
        self._last_failed = False
        self._num_failed = 0
        self._seconds: float | None = None  # of the save that was committed last, until they are told
        self._knows_metric = True

    @property
    def step_under_way(self) -> int | None:
        """The step of the save that is under way."""
        return self._under_way.step if self._under_way is not None else None

    def begin(
        self,
        controller: Controller,
        step: int,
        roles: tuple[str, ...],
        metrics: Mapping[str, float],
        files: Callable[[Path], dict[str, Any]],
    ) -> None:
        """Save these roles as they are after `step`; the loop may go on when this returns.

        `files(folder)` writes more into the checkpoint, and gives what trainer.json holds.
        """
        self.wait()
        start = time.perf_counter()
        try:
            pending = self._store.begin(step)
            state = files(pending)
        except OSError as error:
            self._fail(step, [f"rank 0: {error.filename}: {error.strerror}"])
            return
        scratch = self._options.scratch_dir
        # While training goes on, the copy has to have room beside it in any case; scratch is there to make it short.
        keep_memory = self._options.async_save and scratch is None
        seconds = time.perf_counter() - start
        for call in [controller[role].begin_save(str(pending), scratch, keep_memory) for role in roles]:
            call.get()
        self._under_way = Save(controller, step, roles, state, self._metric(step, metrics), seconds)
        if not self._options.async_save:
            self.wait()

    def poll(self) -> None:
        """Bring a save that is under way forward, without waiting for a disk."""
        save = self._under_way
        if save is not None and save.committed is None and save.is_written():
            self._finish(save)
        if save is not None and save.committed is not None and save.committed.done():
            self._end(save, save.committed)

    def wait(self) -> bool:
        """Until no save is under way. Gives whether the last one that was begun is a checkpoint now."""
        save = self._under_way
        if save is not None and save.committed is None:
            self._finish(save)
        if save is not None and save.committed is not None:
            self._end(save, save.committed)
        return not self._last_failed

    def metrics(self) -> dict[str, float]:
        """Of the saves that have ended: seconds that the last one took, beside the loop or not, and how many failed."""
        found = {"perf/save_seconds": self._seconds} if self._seconds is not None else {}
        self._seconds = None
        return found | ({"perf/failed_saves": float(self._num_failed)} if self._num_failed else {})

    def _finish(self, save: Save) -> None:
        parts = save.finish()
        problems = [part.problem for part in parts if part.problem is not None]
        if problems:
            self._fail(save.step, problems)
            return
        files = [entry for part in parts for entry in part.files]
        save.seconds += max(part.seconds for part in parts)

        def commit() -> float:
            start = time.perf_counter()
            self._store.commit(save.step, save.state, files, save.metric)
            return time.perf_counter() - start

        pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        save.committed = pool.submit(commit)
        pool.shutdown(wait=False)

    def _end(self, save: Save, committed: Future[float]) -> None:
        try:
            self._seconds = save.seconds + committed.result()
        except OSError as error:
            self._fail(save.step, [f"rank 0: {error.filename}: {error.strerror}"])
            return
        self.saved_step, self._under_way, self._last_failed = save.step, None, False
        self._timers.took("save_checkpoint", self._seconds)  # what a save takes for which the loop has to wait
        log.info("saved %s", self._store.folder(save.step))

    def _fail(self, step: int, problems: list[str]) -> None:
        self._store.discard(step)
        self._under_way, self._last_failed = None, True
        self._num_failed += 1
        more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        newest = self._store.newest()
        log.warning(
            "the checkpoint of step %d cannot be written: %s%s; the run goes on, %s",
            *(step, problems[0], more, f"{newest} stays the newest checkpoint" if newest else "without a checkpoint"),
        )

    def _metric(self, step: int, metrics: Mapping[str, float]) -> float | None:
        name = self._options.best_metric
        if name is None or name in metrics:
            return metrics[name] if name is not None else None
        if self._knows_metric:
            validated = ", ".join(key for key in metrics if key.startswith(("val-core/", "val/"))) or "none"
            log.warning(
                "trainer.checkpoint.best_metric=%s is not among the metrics of step %d, so its checkpoint is none of "
                "the best; validation metrics of that step: %s",
                *(name, step, validated),
            )
        self._knows_metric = False
        return None


def retention(trainer: TrainerConfig) -> Retention:
    options = trainer.checkpoint
    return Retention(
        last=trainer.max_ckpt_to_keep,
        every=options.keep_every,
        best=options.keep_best,
        metric=options.best_metric,
        larger_is_better=options.best_mode == "max",
    )
