"""A machine's efficiencies by phase, and their uncertainty, from measured steps. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

from hpcrl.plan.memory import TrainingPlan
from hpcrl.predict.lengths import Lengths
from hpcrl.predict.machine import Machine
from hpcrl.predict.modes import GENERATES
from hpcrl.predict.step import predict

ROUNDS = 8  # of Newton's method; phases that share cores change each other's time
LEAST_SHARE = 0.2  # of what the efficiency divides, in a phase: less is taken to be this much, which slows the fit down
SMALLEST = 0.02  # share of a step; a shorter phase is not fitted
OFF = 1.25  # times the fitted prediction, or less than it, that is said
ASSUMED = 0.5  # relative error of a phase that one run has
SHARE = 0.1  # by which a share of a phase's time differs from that of other runs to be named as the cause


@dataclass(frozen=True)
class Measured:
    """Steps of a run that have the same lengths: seconds by the names of `timing_s/<phase>`, in the middle of them."""

    run: str
    job: TrainingPlan
    lengths: Lengths
    seconds: Mapping[str, float]

    @property
    def phases(self) -> dict[str, float]:
        """Those that take a part of the step and are timed as they are predicted: of an asynchronous job, `gen` and
        `reward` are what the trainer waited for."""
        step = self.seconds.get("step") or sum(self.seconds.values())
        apart = {"step"} if self.job.config.async_training.mode == "sync" else {"step", "reward", *GENERATES}
        return {name: took for name, took in self.seconds.items() if name not in apart and took >= SMALLEST * step}


class Fitted(NamedTuple):
    """Of a phase: the ideal time as a share of the measured one, the relative standard error of a prediction (None: of
    one run it is not known), and the number of runs."""

    efficiency: float
    spread: float | None
    runs: int


class Miss(NamedTuple):
    """A phase of a run that took `ratio` times what the fitted machine predicts."""

    run: str
    phase: str
    ratio: float
    cause: str


def fit(measured: Sequence[Measured], machine: Machine) -> dict[str, Fitted]:
    """By phase, the efficiency with which the geometric mean over runs of predicted / measured is 1.

    Errors are taken to be factors, so means are of logarithms; a run counts once, whatever number of steps it has. The
    standard error of a new prediction from n runs is s sqrt(1 + 1 / n), with s that of the n logarithms. Phases of a
    timeline are taken as they are predicted there, that is, with what they wait for cores.
    """
    current = machine.model_copy(update={"efficiency": {}, "spread": {}})
    found: dict[str, Fitted] = {}
    for _ in range(ROUNDS):
        ratios, divided = log_ratios(measured, current)
        for phase, of_runs in ratios.items():
            values, before = list(of_runs.values()), found[phase].efficiency if phase in found else 1.0
            change = fmean(values) / max(LEAST_SHARE, divided[phase])
            found[phase] = Fitted(before * math.exp(change), _spread(values), len(values))
        current = fitted_machine(machine, found)
    return found


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) * math.sqrt(1 + 1 / len(values)) if len(values) > 1 else None


def fitted_machine(machine: Machine, found: Mapping[str, Fitted]) -> Machine:
    """The machine with these efficiencies; of other phases it keeps its own."""
    efficiency = {name: it.efficiency for name, it in found.items()}
    spread = {name: ASSUMED if it.spread is None else it.spread for name, it in found.items()}
    return machine.model_copy(
        update={"efficiency": machine.efficiency | efficiency, "spread": machine.spread | spread, "measured": True}
    )


def log_ratios(measured: Iterable[Measured], machine: Machine) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """By phase and run, log(predicted / measured), the mean over the run's steps; by phase, the share of its time that
    the efficiency divides."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    shares: dict[str, list[float]] = defaultdict(list)
    for it in measured:
        prediction = predict(it.job, machine, it.lengths)
        for name, took in it.phases.items():
            if prediction.phases.get(name):
                found[name][it.run].append(math.log(prediction.phases[name] / took))
                shares[name].append(1 - prediction.parts[name].get("communication", 0.0))
    ratios = {name: {run: fmean(values) for run, values in of_runs.items()} for name, of_runs in found.items()}
    return ratios, {name: fmean(values) for name, values in shares.items()}


def misses(measured: Sequence[Measured], machine: Machine) -> Iterator[Miss]:
    """The phases that a fitted machine predicts badly, with the likely cause, worst first."""
    ratios, _ = log_ratios(measured, machine)
    parts: dict[str, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for it in measured:
        prediction = predict(it.job, machine, it.lengths)
        for name in it.phases:
            if name in prediction.parts:
                parts[name][it.run] = prediction.parts[name]
    found = [
        Miss(run, name, math.exp(-value), cause(value < 0, parts[name], run))
        for name, of_runs in ratios.items()
        for run, value in of_runs.items()
        if abs(value) > math.log(OFF)
    ]
    yield from sorted(found, key=lambda it: -abs(math.log(it.ratio)))


def cause(takes_longer: bool, parts: Mapping[str, Mapping[str, float]], run: str) -> str:
    """The kind of time whose share differs most from that of the other runs: it is what the model counts too low, if
    the phase takes longer and has more of it, or too high."""
    own, others = parts[run], [shares for name, shares in parts.items() if name != run]
    if not others:
        return "there is no other run to compare it with"
    kinds = sorted({kind for shares in parts.values() for kind in shares})
    usual = {kind: median(shares.get(kind, 0.0) for shares in others) for kind in kinds}
    kind = max(kinds, key=lambda kind: abs(own.get(kind, 0.0) - usual[kind]))
    mine, typical = own.get(kind, 0.0), usual[kind]
    if abs(mine - typical) < SHARE:
        return "its parts are those of the other runs, so it is the run: other work on its nodes, or noise"
    counted = "low" if (mine > typical) == takes_longer else "high"
    return f"{kind} is {mine:.0%} of it, and {typical:.0%} in other runs: it is counted too {counted}"
