"""`hpcrl plan --calibrate RUN... --machine NAME`: a machine's efficiencies by phase, fitted to the steps of runs.

No torch, no MPI.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from hpcrl.config.derive import JobDescription
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import GENERATES, Prediction, predict, with_measured_load
from hpcrl.machine.machine_file import Machine, check_target, read_machine, save_machine
from hpcrl.observe.read.archive import read_samples
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.record.archive import ArchiveError, step_path
from hpcrl.runtime.exits import InputError

WARM_UP = 2  # first steps of a run, in which kernels are compiled and buffers made
STEPS = 8  # of a run that are read, evenly spaced
TIMING = "timing_s/"


def read_measured(folder: str, job: JobDescription) -> list[Measured]:
    """Some steps of a run, each with its lengths. Raises InputError, one line."""
    run = Path(folder)
    if not (run / "config.yaml").is_file():
        raise InputError(f"{folder}: found no config.yaml; expected the folder of a run of `hpcrl train`")
    try:
        rows = read_run(run).rows
    except RunError as error:
        raise InputError(str(error)) from None
    timed = [step for step, row in rows.items() if f"{TIMING}gen" in row and f"{TIMING}step" in row]
    if not timed:
        raise InputError(f"{folder}: found no step with timing_s/gen in its metrics; expected a run of `hpcrl train`")
    usable = timed[WARM_UP:] or timed[-1:]
    chosen = [usable[number * len(usable) // STEPS] for number in range(STEPS)] if len(usable) > STEPS else usable
    num_ranks = sum(1 for _ in (run / "heartbeat").glob("rank_*"))  # 0: it is not known
    config = on_its_ranks(job.read_config(str(run / "config.yaml")), num_ranks)
    config = with_measured_load(config, rows[chosen[len(chosen) // 2]])
    plan = TrainingPlan(config, tuple(job.own_specs()))
    samples = plan.derived.samples_per_step
    measured = []
    for step, row in ((step, rows[step]) for step in chosen):
        seconds = {name.removeprefix(TIMING): value for name, value in row.items() if name.startswith(TIMING)}
        measured.append(Measured(folder, plan, lengths_of_step(run, step, row, samples), seconds))
    return measured


def on_its_ranks(config: Config, ranks: int) -> Config:
    """The config with as many ranks as the job had, which mpiexec may have started in place of Slurm."""
    job = config.job
    if ranks in (0, job.nodes * job.ntasks_per_node):
        return config
    nodes = job.nodes if ranks % job.nodes == 0 else 1
    return with_keys(config, {"job.nodes": nodes, "job.ntasks_per_node": ranks // nodes})


def lengths_of_step(run: Path, step: int, row: dict[str, float], samples: int) -> Lengths:
    """Those of the archive; without one, log-normal lengths with the mean and the longest one of the metrics."""
    try:
        samples_read = read_samples(step_path(run / "rollouts", step), ("prompt_length", "response_length"), run)
        return Lengths.of_samples(samples_read["prompt_length"].tolist(), samples_read["response_length"].tolist())
    except ArchiveError:
        prompt = round(row.get("prompt_length/mean", 0.0))
        mean, longest = row.get("response_length/mean", 0.0), row.get("response_length/max", 0.0)
        if not mean >= 1 or not longest >= mean:
            raise InputError(f"{run}: step {step} has neither an archive nor response_length/mean and max") from None
        return Lengths.log_normal(prompt, mean, sigma_of(mean, longest, samples), round(longest))


def sigma_of(mean: float, longest: float, samples: int) -> float:
    """The sigma of a log-normal distribution whose largest of so many samples is `longest`: with z the quantile of the
    standard normal distribution at 1 - 1 / (samples + 1), ln(longest / mean) = z sigma - sigma^2 / 2."""
    z = NormalDist().inv_cdf(1 - 1 / (max(samples, 2) + 1))
    return z - math.sqrt(max(0.0, z**2 - 2 * math.log(longest / mean)))


ROUNDS = 8  # of Newton's method; phases that share cores change each other's time
RIDGE = 0.02  # weight of a communication that is as the machine file says, in squares of logarithms, of one run
SMALLEST = 0.02  # share of a step; a shorter phase is not fitted
OFF = 1.25  # times the fitted prediction, or less than it, that is said
ASSUMED = 0.5  # relative error of a phase that one run has
SHARE = 0.1  # by which a share of a phase's time differs from that of other runs to be named as the cause


@dataclass(frozen=True)
class Measured:
    """Steps of a run that have the same lengths: median seconds by the names of `timing_s/<phase>`."""

    run: str
    job: TrainingPlan
    lengths: Lengths
    seconds: Mapping[str, float]

    @property
    def phases(self) -> dict[str, float]:
        """Those that take a part of the step and are timed as they are predicted: of an asynchronous job, `gen`,
        `reward` and `update_weights` have what the trainer waited for."""
        step = self.seconds.get("step") or sum(self.seconds.values())
        waits = {"reward", "update_weights", *GENERATES}
        apart = {"step"} if self.job.config.async_training.mode == "sync" else {"step", *waits}
        return {name: took for name, took in self.seconds.items() if name not in apart and took >= SMALLEST * step}


class Fitted(NamedTuple):
    """Of a phase: the ideal time as a share of the measured one, without communication, and of communication; the
    relative standard error of a prediction (None: of one run it is not known), and the number of runs."""

    efficiency: float
    communication: float
    spread: float | None
    runs: int


class Ratio(NamedTuple):
    """Of a phase of a run: log(predicted / measured), and communication's share of the predicted time."""

    value: float
    communication: float


class Miss(NamedTuple):
    """A phase of a run that took `ratio` times what the fitted machine predicts."""

    run: str
    phase: str
    ratio: float
    cause: str


def fit(measured: Sequence[Measured], machine: Machine) -> dict[str, Fitted]:
    """By phase, the efficiencies with which the squares of log(predicted / measured) over the runs are least.

    A run counts once, whatever number of steps it has. Runs with different shares of communication determine its
    efficiency; without them it stays 1. The standard error of a new prediction from n runs is s sqrt(1 + 1 / n), with s
    that of the n logarithms. Phases of a timeline are taken as they are predicted there, that is, with what they wait
    for cores.
    """
    current = machine.model_copy(update={"efficiency": {}, "communication": {}, "spread": {}})
    fits: dict[str, Fitted] = {}
    for _ in range(ROUNDS):
        for phase, of_runs in log_ratios(predicted(measured, current)).items():
            before, ratios = fits.get(phase, Fitted(1.0, 1.0, None, 0)), list(of_runs.values())
            slower, slower_communication = newton(ratios, -math.log(before.communication))
            efficiency, communication = before.efficiency / slower, before.communication / slower_communication
            runs = len(ratios)
            spread = stdev(it.value for it in ratios) * math.sqrt(1 + 1 / runs) if runs > 1 else None
            fits[phase] = Fitted(efficiency, communication, spread, runs)
        current = fitted_machine(machine, fits)
    return fits


def newton(ratios: Sequence[Ratio], log_communication: float) -> tuple[float, float]:
    """One step of the least squares: factors of the time without communication, and of communication, which is
    e^log_communication times what the machine file says.

    With r_i = log(predicted / measured) and x_i communication's share: the a and b that make sum (r_i + a (1 - x_i) +
    b x_i)^2 + RIDGE (log_communication + b)^2 least; the factors are e^a and e^b.
    """
    own = sum((1 - it.communication) ** 2 for it in ratios)
    both = sum((1 - it.communication) * it.communication for it in ratios)
    other = sum(it.communication**2 for it in ratios) + RIDGE
    right = -sum((1 - it.communication) * it.value for it in ratios)
    right_other = -sum(it.communication * it.value for it in ratios) - RIDGE * log_communication
    determinant = own * other - both**2
    if determinant < 1e-9:
        return 1.0, math.exp(right_other / other)
    a = (right * other - both * right_other) / determinant
    b = (own * right_other - both * right) / determinant
    return math.exp(max(-2.0, min(2.0, a))), math.exp(max(-2.0, min(2.0, b)))


def fitted_machine(machine: Machine, fits: Mapping[str, Fitted]) -> Machine:
    """The machine with these efficiencies; of other phases it keeps its own."""
    efficiency = machine.efficiency | {name: it.efficiency for name, it in fits.items()}
    of_communication = {name: it.communication for name, it in fits.items() if it.communication != 1.0}
    spread = machine.spread | {name: ASSUMED if it.spread is None else it.spread for name, it in fits.items()}
    changes = {"efficiency": efficiency, "communication": machine.communication | of_communication, "spread": spread}
    return machine.model_copy(update=changes | {"measured": True})


def predicted(measured: Iterable[Measured], machine: Machine) -> list[tuple[Measured, Prediction]]:
    return [(it, predict(it.job, machine, it.lengths)) for it in measured]


def log_ratios(pairs: Iterable[tuple[Measured, Prediction]]) -> dict[str, dict[str, Ratio]]:
    """By phase and run, the mean over the run's steps."""
    ratios: dict[str, dict[str, list[Ratio]]] = defaultdict(lambda: defaultdict(list))
    for it, prediction in pairs:
        for name, took in it.phases.items():
            if prediction.phases.get(name):
                parts = prediction.parts[name]  # what waits for cores is of both kinds
                share = parts.get("communication", 0.0) / max(1e-9, 1 - parts.get("waiting", 0.0))
                ratios[name][it.run].append(Ratio(math.log(prediction.phases[name] / took), min(1.0, share)))
    return {
        name: {run: Ratio(*map(fmean, zip(*values, strict=True))) for run, values in of_runs.items()}
        for name, of_runs in ratios.items()
    }


def misses(measured: Sequence[Measured], machine: Machine) -> list[Miss]:
    """The phases that a fitted machine predicts badly, with the likely cause, worst first."""
    pairs, rows = predicted(measured, machine), list[Miss]()
    for name, of_runs in log_ratios(pairs).items():
        parts = {it.run: its.parts[name] for it, its in pairs if name in it.phases and name in its.parts}
        for run, ratio in of_runs.items():
            if abs(ratio.value) > math.log(OFF):
                rows.append(Miss(run, name, math.exp(-ratio.value), cause(ratio.value < 0, parts, run)))
    return sorted(rows, key=lambda it: -abs(math.log(it.ratio)))


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


SHOWN = 10  # phases of runs that are predicted badly


def calibration_lines(job: JobDescription, path: str, others: Sequence[str], parsed: argparse.Namespace) -> list[str]:
    """The lines of the table, for the runs `path` and `others`. Raises ConfigError or InputError, one line."""
    if parsed.machine is None:
        raise ConfigError("found --calibrate without --machine; name the machine that the runs ran on")
    if parsed.out is not None:
        check_target(parsed.out, "--out")
    machine, measured = read_machine(parsed.machine), [it for run in (path, *others) for it in read_measured(run, job)]
    fits = fit(measured, machine)
    fitted = fitted_machine(machine, fits)
    lines = [*fitted_table(fits, measured, machine), "", *_miss_lines(measured, fitted)]
    if parsed.out is not None:
        runs = ", ".join(dict.fromkeys(Path(it.run).name for it in measured))
        sources = [*machine.sources, f"efficiency and spread: `hpcrl plan --calibrate` of {runs}"]
        figures = fitted.model_dump(mode="json") | {"sources": sources, "name": Path(parsed.out).stem}
        save_machine(parsed.out, figures)
        lines.append(f"  {'written':<22}{parsed.out}: {machine.name} with these efficiencies, for --machine")
    return lines


def fitted_table(fits: Mapping[str, Fitted], measured: Sequence[Measured], machine: Machine) -> Iterator[str]:
    runs = len({it.run for it in measured})
    yield f"{machine.name}, fitted to {len(measured)} steps of {runs} {'run' if runs == 1 else 'runs'}"
    yield f"  {'phase':<26}{'efficiency':>12}{'of communication':>18}{'error':>8}{'runs':>6}"
    for name, it in fits.items():
        error = f"{ASSUMED:.0%} *" if it.spread is None else f"{it.spread:.0%}"
        yield f"  {name:<26}{it.efficiency:>12.3f}{it.communication:>18.3f}{error:>8}{it.runs:>6}"
    if any(it.spread is None for it in fits.values()):
        yield "  * of one run the error is not known: it is taken to be this"


def _miss_lines(measured: Sequence[Measured], machine: Machine) -> Iterator[str]:
    rows = misses(measured, machine)
    if not rows:
        yield "  every phase of every run is within 25% of what the fitted machine predicts"
    for it in rows[:SHOWN]:
        yield f"  {it.phase} of {it.run} took {it.ratio:.2f} times the prediction: {it.cause}"
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} more"
