"""The times and lengths that the steps of a run have left in its folder. No torch, no MPI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from hpcrl.config.derive import JobDescription
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.calibrate import Measured
from hpcrl.forecast.time.experts import with_measured_load
from hpcrl.forecast.time.lengths import Lengths
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
    config = on_its_ranks(job.read_config(str(run / "config.yaml")), _num_ranks(run))
    config = with_measured_load(config, rows[chosen[len(chosen) // 2]])
    plan = TrainingPlan(config, tuple(job.own_specs()))
    samples = plan.derived.samples_per_step
    return [
        Measured(folder, plan, lengths_of_step(run, step, rows[step], samples), _seconds(rows[step])) for step in chosen
    ]


def _seconds(row: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(TIMING): value for name, value in row.items() if name.startswith(TIMING)}


def _num_ranks(run: Path) -> int:
    """0: it is not known."""
    return sum(1 for _ in (run / "heartbeat").glob("rank_*"))


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
        found = read_samples(step_path(run / "rollouts", step), ("prompt_length", "response_length"), run)
        return Lengths.of_samples(found["prompt_length"].tolist(), found["response_length"].tolist())
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


def read_all(folders: Sequence[str], job: JobDescription) -> list[Measured]:
    return [measured for folder in folders for measured in read_measured(folder, job)]
