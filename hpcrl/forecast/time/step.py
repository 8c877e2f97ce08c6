"""How long a step of a training job takes on a machine, phase by phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.bound import least
from hpcrl.forecast.time.cost import Cost, fitted
from hpcrl.forecast.time.decode import generation_cost, schedule
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.modes import step_of
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.forecast.time.timeline import Span
from hpcrl.forecast.time.training import forward_cost, packing, update_cost
from hpcrl.machine.machine_file import UNKNOWN_SPREAD, Machine

APART = ("save_checkpoint",)  # between two steps


@dataclass(frozen=True)
class Prediction:
    """seconds: of a step, with its share of a save. phases: seconds by the name of `timing_s/<phase>`; those of phases
    that overlap add up to more than the step. parts: by phase, the share of its time by what limits it, see
    `hpcrl.forecast.time.cost.Cost`. spans: what the step's ranks do, from its start; of an asynchronous job, several steps,
    the tasks of step k named `<phase>/<k>`. roles: by phase, the role that works in it."""

    seconds: float
    phases: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]
    tokens_per_second: float
    spans: tuple[Span, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds of `timing_s/step`, which has no save."""
        return self.seconds - sum(self.phases.get(name, 0.0) for name in APART)

    def spread(self, machine: Machine) -> float:
        """Relative error of the step on the machine, if those of its phases add up."""
        total = sum(self.phases.values())
        errors = (machine.spread.get(name, UNKNOWN_SPREAD) * seconds for name, seconds in self.phases.items())
        return sum(errors) / total if total else UNKNOWN_SPREAD

    def band(self, machine: Machine) -> tuple[float, float]:
        """Seconds between which the step is, about: less and more by the factor 1 + spread."""
        factor = 1 + self.spread(machine)
        return self.seconds / factor, self.seconds * factor

    def together(self, phases: Collection[str]) -> list[tuple[tuple[str, ...], float]]:
        """Those of the phases that the step has, in groups that overlap, each with the seconds from the start of its
        first phase to the end of its last one."""
        spans = sorted((it.start, it.end, name) for name, it in _of_step(self.spans).items() if name in phases)
        found: list[tuple[tuple[str, ...], float, float]] = []
        for start, end, name in spans:
            if found and start < found[-1][2]:
                names, first, last = found.pop()
                found.append(((*names, name), first, max(last, end)))
            else:
                found.append(((name,), start, end))
        return [(names, end - start) for names, start, end in found]


def predict(job: TrainingPlan, machine: Machine, lengths: Lengths) -> Prediction:
    """Raises ConfigError or InputError, one line, if the job cannot run.

    A phase takes its ideal time divided by `machine.efficiency[phase]`, its communication's by
    `machine.communication[phase]`. Phases of a role follow each other, and those of roles on the same ranks too; on
    ranks of their own they overlap as far as the job's mode lets them, and if ranks of a node have too few cores, each
    takes longer.
    """
    times = JobTimes(job, machine, lengths)
    timed = [it._replace(cost=fitted(it.cost, machine, it.name)) for it in times.phases()]
    inside = [it for it in timed if it.name not in APART]
    mode, each = job.config.async_training, job.config.job.ntasks_per_node
    step = step_of(inside, mode, machine.node.cores, each)
    took = {name: span.end - span.start for name, span in _of_step(step.spans).items()}
    parts, phases = {}, {}
    for it in timed:
        ideal = it.cost.seconds
        phases[it.name] = took.get(it.name, ideal)
        cost = it.cost + Cost(waiting=max(0.0, phases[it.name] - ideal))
        parts[it.name] = cost.shares() if cost.seconds > 0 else {}
    seconds = step.seconds + sum(it.cost.seconds for it in timed if it.name in APART)
    tokens = job.derived.samples_per_step * lengths.mean
    roles = {it.name: it.role for it in timed}
    return Prediction(seconds, phases, parts, tokens / seconds, tuple(step.spans), roles)


def lower_bound(job: TrainingPlan, machine: Machine, lengths: Lengths) -> float:
    """Seconds that are no more than `predict(...).seconds`: without communication, launches, bubbles and copies."""
    mode, each = job.config.async_training, job.config.job.ntasks_per_node
    return step_of(least(JobTimes(job, machine, lengths)), mode, None, each).seconds


def forget_lengths() -> None:
    """Free what is cached by lengths: those of a real step do not come again."""
    for cached in (forward_cost, update_cost, packing, generation_cost, schedule):
        cached.cache_clear()


def _of_step(spans: Sequence[Span]) -> dict[str, Span]:
    """The span of each phase, of several steps in the last one but one, which has others beside it."""
    steps = [int(span.task.rpartition("/")[2]) for span in spans if "/" in span.task]
    wanted = max(steps) - 1 if steps else 0
    found = {}
    for span in spans:
        name, _, step = span.task.partition("/")
        if not step or int(step) == wanted:
            found[name] = span
    return found
