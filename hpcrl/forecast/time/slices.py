"""How the steps of a run divide over the slices of a job chain. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.machine.machine_file import Machine

SETUP = 300.0  # starting MPI, imports and building the models, where no slice of the run has measured it
MINUTE = 60


@dataclass(frozen=True)
class Slice:
    """A slice: after its set-up it makes whole steps, then it saves. setup: before the first step. save: after the
    last one. reserve: at the end of the wall time, in which no step ends; a save fits into it. A step that is cut is
    made again by the next slice."""

    length: float  # wall time
    setup: float
    save: float
    reserve: float

    def num_steps(self, step: float) -> int:
        """Steps of `step` seconds that end in the slice."""
        return max(0, math.floor((self.length - self.setup - self.reserve) / step + 1e-9))

    def needed(self, steps: int, step: float) -> float:
        """The wall time of one slice with so many steps."""
        return self.setup + steps * step + self.reserve


class Division(NamedTuple):
    """slices: their number. steps: of a slice that is not the last one. seconds: from the start of the first slice to
    the end of the last one, without the queue; all but the last take their whole wall time."""

    slices: int
    steps: int
    seconds: float


def divide(steps: int, step: float, its: Slice) -> Division | None:
    """The slices of a run; None if not even one step ends in a slice.

    With n slices of length L: (n - 1) L + set-up + the steps that are left + a save. It grows with `step`, so on the
    same nodes the layout with the shortest step is also the one with the shortest run.
    """
    each = its.num_steps(step)
    if each == 0:
        return None
    slices = math.ceil(steps / each)
    left = steps - (slices - 1) * each
    return Division(slices, each, (slices - 1) * its.length + its.setup + left * step + its.save)


def order(nodes: int, steps: int | None, step: float, its: Slice) -> tuple[float, ...]:
    """What is smallest for the best number of nodes: the fewest on which all steps end within one slice; if there are
    none, or the number of steps is not known, those with the most steps in a slice, the fewest of them; if no step ends
    in a slice, those with the shortest step."""
    each = its.num_steps(step)
    if steps is not None and each >= steps:
        return 0, nodes
    return (1, -each, nodes) if each else (2, step)


def shortest(steps: int, step: float, its: Slice, limit: float | None) -> float | None:
    """The shortest wall time with which the run takes one slice; if that is above `limit`, with which it takes as few
    slices as with the limit. None if no step ends within it."""
    if limit is None or its.needed(steps, step) <= limit:
        return its.needed(steps, step)
    division = divide(steps, step, replace(its, length=limit))
    return None if division is None else its.needed(math.ceil(steps / division.slices), step)


def slice_of(
    job: TrainingPlan, machine: Machine, lengths: Lengths, length: float, measured: Mapping[str, float] | None = None
) -> Slice:
    """The slice of a job on a machine. measured: the run's times.json, whose set-up and save count if it has them."""
    measured, times, cfg = measured or {}, JobTimes(job, machine, lengths), job.config
    save = max(times.writing() / machine.efficiency.get("save_checkpoint", 1.0), measured.get("save_s", 0.0))
    setup = measured.get("setup_s", SETUP + times.reading())
    # Ranks stop at the signal, or when the next phase and a save would not leave the margin.
    return Slice(length, setup, save, max(float(cfg.job.signal_seconds), save + cfg.trainer.walltime_margin))


def counted(slices: int) -> str:
    return "1 slice" if slices == 1 else f"{slices} slices"


def clock(seconds: float, limit: float | None = None) -> str:
    """[D-]HH:MM:SS, in whole minutes that are not fewer; at most the limit."""
    whole = MINUTE * math.ceil(seconds / MINUTE)
    whole = whole if limit is None else min(whole, math.floor(limit))
    days, rest = divmod(whole, 24 * 3600)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text
