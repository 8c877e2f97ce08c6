"""What `hpcrl submit` predicts of a job by its job.machine: a step's time, slices, node-hours, and a faster layout."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrl.config.derive import JobDescription
from hpcrl.config.schema import AUTO, Config, seconds_of
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.search import AXES, Result, Search
from hpcrl.forecast.time.search_command import Asked, Slice, clock, counted, divide, has_rollout, shortest
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.forecast.time.table import lengths_of
from hpcrl.machine.machine_file import read_machine
from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError

SLOWER = 1.3  # times the step of the fastest layout that the search finds; submit warns above it
QUICK = (*AXES, "offload")  # what the search varies: a part of what `hpcrl plan --search` does, in a few seconds


@dataclass(frozen=True)
class Forecast:
    """The prediction of a job. path, overrides, response_lengths: as `hpcrl plan` takes them."""

    asked: Asked
    overrides: tuple[str, ...]
    response_lengths: str | None
    prediction: Prediction

    @property
    def config(self) -> Config:
        return self.asked.config

    def slice(self, length: float) -> Slice:
        return self.asked.slice(TrainingPlan(self.config, self.asked.own_roles), length)

    def time(self, max_time: str | None) -> str:
        """The job.time in which the run ends if its steps take as long as they may by the machine's spread, at most
        max_time. Raises InputError, one line, if there is none."""
        if self.asked.steps is None:
            raise InputError(
                "job.time=auto needs trainer.total_training_steps: without it the number of steps depends on the data; "
                "set it, or job.time"
            )
        limit = None if max_time is None else seconds_of(max_time)
        step, its = self.prediction.band(self.asked.machine)[1], self.slice(limit or 0.0)
        needed = shortest(self.asked.steps, step, its, limit)
        if needed is None:
            raise InputError(
                f"no step ends within the site's max_time={max_time}: set-up takes {its.setup:.0f} s, a step up to "
                f"{step:.0f} s, and the end of a slice {its.reserve:.0f} s; use more nodes, or set job.time"
            )
        return clock(needed, limit)

    def line(self, time: str) -> str:
        """Seconds of a step, and what the run takes in slices of so much time."""
        step, machine = self.prediction.seconds, self.asked.machine
        low, high = self.prediction.band(machine)
        kind = "predicted" if machine.measured else "extrapolated"
        text = f"{step:.4g} s per step ({low:.4g} to {high:.4g}), {kind} for {machine.name}"
        its, nodes = self.slice(seconds_of(time)), self.config.job.nodes
        setup = f"{its.setup:.0f} s of set-up each, {'measured' if 'setup_s' in self.asked.measured else 'assumed'}"
        if self.asked.steps is None:
            each = f"{nodes * step / 3600:.4g} node-hours per step"
            return f"{text}; {its.num_steps(step)} steps end within {time}; {each}; {setup}"
        division = divide(self.asked.steps, step, its)
        if division is None:
            return f"{text}; no step ends within {time}: {setup}, and {its.reserve:.0f} s at the end"
        hours = division.seconds / 3600
        took = f"{self.asked.steps} steps take {hours:.3g} h without validation, {counted(division.slices)} of {time}"
        return f"{text}; {took}, {nodes * hours:,.4g} node-hours; {setup}"

    def warnings(self, time: str) -> list[str]:
        """A line if the run takes more slices than it may have, and one if another layout is much faster."""
        lines, job, steps = [], self.config.job, self.asked.steps
        most = 1 + (job.max_restarts if job.requeue else 0)
        division = None if steps is None else divide(steps, self.prediction.seconds, self.slice(seconds_of(time)))
        if division is not None and division.slices > most:
            why = f"job.max_restarts={job.max_restarts}" if job.requeue else "job.requeue=false"
            lines.append(f"the run takes {counted(division.slices)}, but {why} ends it after {most}")
        if (best := self.faster()) is not None:
            ratio = self.prediction.seconds / best.prediction.seconds
            lines.append(
                f"a step of this layout takes {ratio:.2f} times the {best.prediction.seconds:.4g} s of another one; "
                f"see {self.search()}"
            )
        return lines

    def faster(self) -> Result | None:
        """A layout whose step is more than `SLOWER` times shorter, the fastest of a short search."""
        asked, limit = self.asked, self.prediction.seconds / SLOWER
        search = Search(asked.space(asked.config.job.nodes, varied=QUICK), asked.machine, asked.lengths)
        return next((its for its in search.run() if its.prediction.seconds < limit), None)

    def search(self) -> str:
        """The command of the whole search."""
        lengths = ["--response-lengths", self.response_lengths] if self.response_lengths else []
        machine = ["--machine", str(self.config.job.machine)]
        return shlex.join(["hpcrl", "plan", "--search", self.asked.path, *self.overrides, *machine, *lengths])


def slowest_of(
    job: JobDescription,
    path: str,
    runs: Sequence[tuple[Sequence[str], Config]],
    response_lengths: str | None,
    report: Callable[[str], None],
) -> Forecast | None:
    """The forecast of the run that takes longest, of runs as (overrides, config).

    Without one: None, with a line for `report` if job.machine is set; if job.time=auto, InputError with that line.
    Raises ConfigError for response_lengths that are none.
    """
    for _, config in runs if response_lengths is not None and has_rollout(job) else ():
        lengths_of(TrainingPlan(config), response_lengths)
    try:
        if not has_rollout(job):
            raise InputError("only jobs of `hpcrl train` and jobs of your own like it are predicted")
        if any(config.job.machine is None for _, config in runs):
            raise InputError("job.machine is not set; name a machine of configs/machines or a file")
        forecasts = [forecast(job, path, overrides, config, response_lengths) for overrides, config in runs]
    except Exception as error:  # a job is not lost for a prediction
        name, line = runs[0][1].run.name, exits.summary(error)
        if any(config.job.time == AUTO for _, config in runs):
            raise InputError(f"job.time=auto of {name} needs a prediction: {line}; or set job.time") from error
        if has_rollout(job):
            report(f"warning: {name} is not predicted: {line}")
        return None
    return max(forecasts, key=lambda its: its.prediction.seconds * (its.asked.steps or 1))


def forecast(
    job: JobDescription, path: str, overrides: Sequence[str], config: Config, response_lengths: str | None
) -> Forecast:
    """The forecast of a run. Raises ConfigError or InputError, one line, if there is none."""
    machine, own_roles = read_machine(str(config.job.machine)), tuple(job.own_specs())
    named = path if job.file is None else f"{job.file}:{path}"
    planned = TrainingPlan(config, own_roles)
    lengths = lengths_of(planned, response_lengths)
    prediction = predict(planned, machine, lengths)
    return Forecast(Asked(named, config, own_roles, machine, lengths), tuple(overrides), response_lengths, prediction)
