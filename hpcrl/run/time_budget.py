"""The time that an allocation leaves a run, and whether a chain of allocations makes progress.

<run>/times.json    seconds that later allocations and `hpcrl submit` plan with: setup_s, step_s, save_s, and phases;
                    and the run's total_steps
<run>/slices.json   the last slices (allocations): Slurm's job and restart; step of the newest checkpoint found, -1 for
                    none; end of the allocation, null if it has none; relaunch: how often its ranks have started again
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpcrl.observe.record.progress import PhaseTimers, duration
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.new_files import read_json_or, replace_json

log = logging.getLogger(__name__)

TIMES_FILE, SLICES_FILE = "times.json", "slices.json"
PLANNED = {"step_s": "step", "save_s": "save_checkpoint"}
SLICES_WITHOUT_PROGRESS = 2  # in a row; then the chain ends
SLICES_KEPT = 100


@dataclass
class TimeBudget:
    """Decides before each phase whether it, and the saves that have to follow, still fit. Lives on rank 0.

    Clock times are seconds since the epoch, as Slurm's.
    """

    folder: Path  # of the run, for TIMES_FILE
    timers: PhaseTimers  # of the phases
    requested: Callable[[], str | None]  # the signal that was received
    ends_at: float | None  # end of the allocation; None if it has none
    margin: float  # seconds at the end of the allocation that stay free
    num_saves: Callable[[], int] = lambda: 1  # saves that have to end before the run can stop
    total_steps: int | None = None  # for TIMES_FILE
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._times = read_json_or(self.folder / TIMES_FILE, {})
        self._has_begun = False
        self._before: dict[str, float] = self._times.get("phases", {})  # measured by the last slice

    def reason_to_stop(self, *phases: str) -> str | None:
        """Why the run has to stop before these phases: a signal was received, or they and a save do not fit."""
        if not self._has_begun:
            setup = self.clock() - psutil.Process().create_time() - run_owner.seconds_waited()
            self._times["setup_s"] = max(setup, self._times.get("setup_s", 0.0))
            if self.total_steps is not None:
                self._times["total_steps"] = self.total_steps
            self._has_begun = True
            self.write_times()
        request = self.requested()
        if request is not None:
            return f"{request}, before {phases[0]}"
        if self.ends_at is None:
            return None
        longest = self._before | self.timers.longest
        needed = sum(longest.get(phase, 0.0) for phase in phases)
        needed += self.num_saves() * longest.get("save_checkpoint", 0.0)
        remaining = self.ends_at - self.clock()
        if needed + self.margin <= remaining:
            return None
        ends = duration(max(remaining, 0.0))
        return f"the allocation ends in {ends}; {', '.join(phases)} and a save take {duration(needed)}"

    def write_times(self) -> None:
        """Write the measured times, for later slices."""
        longest = self._before | self.timers.longest
        self._times |= {name: longest[phase] for name, phase in PLANNED.items() if phase in longest}
        self._times["phases"] = longest
        write_json(self.folder / TIMES_FILE, self._times)


def check_progress(
    folder: Path, found_step: int, ends_at: float | None, margin: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise InputError if this slice cannot make progress; called before anything is built.

    It cannot if the remaining time is shorter than a step and a save, as measured before, or if the slices of this job
    before it saved nothing newer than they had found.

    Args:
        found_step: step of the newest checkpoint, -1 for none.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is not None:
        restart = int(environ.get("SLURM_RESTART_COUNT") or 0)
        this = {"job": job, "restart": restart, "step": found_step, "ends_at": ends_at}
        if relaunch := int(environ.get("HPCRL_RELAUNCH") or 0):
            this["relaunch"] = relaunch
            log.warning("relaunch %d in this slice: %s", relaunch, environ.get("HPCRL_RELAUNCH_REASON", ""))
        # Of several attempts in one allocation, the last one counts.
        slices = [
            one for one in read_json_or(folder / SLICES_FILE, []) if (one["job"], one["restart"]) != (job, restart)
        ]
        before = [(one["job"], one["step"]) for one in slices[-SLICES_WITHOUT_PROGRESS:]]
        if before == [(job, found_step)] * SLICES_WITHOUT_PROGRESS:
            start = "no checkpoint" if found_step < 0 else f"the checkpoint of step {found_step}"
            raise InputError(
                f"the last {SLICES_WITHOUT_PROGRESS} slices of job {job} began with {start}, and so does this one; "
                f"expected each to save a newer one: see {folder / 'logs'} for the reason, give the job more time, or "
                "submit it again to try anyway"
            )
        write_json(folder / SLICES_FILE, [*slices, this][-SLICES_KEPT:])
    if ends_at is None:
        return
    times, remaining = read_json_or(folder / TIMES_FILE, {}), max(ends_at - time.time(), 0.0)
    needed = times.get("step_s", 0.0) + times.get("save_s", 0.0)
    log.info("the allocation ends in %s", duration(remaining))
    if needed > 0 and remaining < needed + margin:
        raise InputError(
            f"the allocation ends in {duration(remaining)}; a step and a save of this run took {duration(needed)}, and "
            f"{margin:.0f} s are kept free (trainer.walltime_margin): ask for more time, or, if that was an exception, "
            f"remove {folder / TIMES_FILE}"
        )


def write_json(path: Path, value: Any) -> None:
    run_owner.check()
    try:
        replace_json(path, value)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
