"""A run's share of one allocation: when it has to end, what it measured, and whether the chain of slices gets anywhere.

<run>/times.json    what later slices and `hpcrl submit` plan with, in seconds: setup_s, step_s, save_s, and phases
<run>/slices.json   the last slices: Slurm's job and restart; step of the newest checkpoint found, -1 for none
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from hpcrl.runtime.exits import InputError
from hpcrl.telemetry.progress import duration
from hpcrl.telemetry.timers import PhaseTimers

log = logging.getLogger(__name__)

TIMES_FILE, SLICES_FILE = "times.json", "slices.json"
PLANNED = {"step_s": "step", "save_s": "save_checkpoint"}
FRUITLESS_SLICES = 2  # in a row, after which a chain of them ends
SLICES_KEPT = 100


class Leave(Exception):
    """The slice ends here, says its message; what follows is for the next one."""


class Slice:
    """Lives on rank 0. Times of the clock are seconds since the epoch, as Slurm's.

    requested: says which signal has come, or None. ends_at: end of the allocation, None where nothing ends it.
    margin: seconds of it that stay free, for what was not measured and for leaving.
    """

    def __init__(
        self,
        folder: Path,
        timers: PhaseTimers,
        *,
        requested: Callable[[], str | None],
        ends_at: float | None,
        margin: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.timers = timers
        self.is_open = False  # whether the loop can be left where it is
        self.num_saves: Callable[[], int] = lambda: 1  # that leaving has to wait for
        self._requested = requested
        self._ends_at = ends_at
        self._margin = margin
        self._clock = clock
        self._times = read_json(folder / TIMES_FILE, {})
        self._has_begun = False
        self._before: dict[str, float] = self._times.get("phases", {})  # what the last slice measured
        timers.gate = self._pass_or_leave

    def go_on(self, *phases: str) -> None:
        """Between two steps, or before phases from which there is no way back: raises Leave where they should not
        begin."""
        if not self._has_begun:
            setup = self._clock() - psutil.Process().create_time()
            self._times["setup_s"] = max(setup, self._times.get("setup_s", 0.0))
            self._has_begun = True
        self.is_open = True
        self.timers.before(*phases)
        self.is_open = False

    def remember_times(self) -> None:
        """What was measured, for later slices."""
        longest = self._before | self.timers.longest
        self._times |= {name: longest[phase] for name, phase in PLANNED.items() if phase in longest}
        self._times["phases"] = longest
        write_json(self.folder / TIMES_FILE, self._times)

    def _pass_or_leave(self, phases: tuple[str, ...]) -> None:
        if not self.is_open:
            return
        why = self._why_not(phases)
        if why is not None:
            self.is_open = False  # what leaving has to do is not to be left
            raise Leave(why)

    def _why_not(self, phases: tuple[str, ...]) -> str | None:
        request = self._requested()
        if request is not None:
            return f"{request}, before {phases[0]}"
        if self._ends_at is None:
            return None
        longest = self._before | self.timers.longest
        needed = sum(longest.get(phase, 0.0) for phase in phases)
        needed += self.num_saves() * longest.get("save_checkpoint", 0.0)
        left = self._ends_at - self._clock()
        if needed + self._margin <= left:
            return None
        return (
            f"the allocation ends in {duration(max(left, 0.0))}; {', '.join(phases)} and a save take {duration(needed)}"
        )


def check_progress(
    folder: Path, found_step: int, ends_at: float | None, margin: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Before anything is built: InputError where this slice would get nowhere.

    That is where the time left is too short for a step and a save, as they were measured before, or where the slices of
    this job before it left nothing newer than they found. `found_step`: the newest checkpoint, -1 for none.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is not None:
        restart = int(environ.get("SLURM_RESTART_COUNT") or 0)
        this = {"job": job, "restart": restart, "step": found_step}
        # Of several tries in one allocation, which a person makes, the last one counts.
        slices = [one for one in read_json(folder / SLICES_FILE, []) if (one["job"], one["restart"]) != (job, restart)]
        before = [(one["job"], one["step"]) for one in slices[-FRUITLESS_SLICES:]]
        if before == [(job, found_step)] * FRUITLESS_SLICES:
            found = "no checkpoint" if found_step < 0 else f"the checkpoint of step {found_step}"
            raise InputError(
                f"the last {FRUITLESS_SLICES} slices of job {job} began with {found}, and so does this one; expected "
                f"each to leave a newer one: see {folder / 'logs'} for why they did not, give the job more time, or "
                "submit it anew to try all the same"
            )
        write_json(folder / SLICES_FILE, [*slices, this][-SLICES_KEPT:])
    if ends_at is None:
        return
    times, left = read_json(folder / TIMES_FILE, {}), max(ends_at - time.time(), 0.0)
    needed = times.get("step_s", 0.0) + times.get("save_s", 0.0)
    log.info("the allocation ends in %s", duration(left))
    if needed > 0 and left < needed + margin:
        raise InputError(
            f"the allocation ends in {duration(left)}; a step and a save of this run took {duration(needed)}, and "
            f"{margin:.0f} s are kept free (trainer.walltime_margin): ask for more time, or, if that was an exception, "
            f"remove {folder / TIMES_FILE}"
        )


def read_json(path: Path, absent: Any) -> Any:
    """`absent` also where the file is damaged: it only helps to plan."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return absent
    return found if isinstance(found, type(absent)) else absent


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
