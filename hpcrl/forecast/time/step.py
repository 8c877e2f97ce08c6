"""How long a step of a training job takes on a machine: its tasks in each mode, and when they start and end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.cost import Cost, fitted
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes, Timed
from hpcrl.forecast.time.samples import forward_cost, generation_cost, packing, schedule, update_cost
from hpcrl.machine.machine_file import UNKNOWN_SPREAD, Machine


@dataclass(frozen=True)
class Task:
    """Work of `seconds` on all of `ranks` at the same time, if each has `demand` cores for itself. after: names of
    tasks that have to end before it starts."""

    name: str
    ranks: tuple[int, ...]
    seconds: float
    after: tuple[str, ...] = ()
    demand: float = 1.0


class Span(NamedTuple):
    task: str
    ranks: tuple[int, ...]
    start: float
    end: float

    @property
    def phase(self) -> str:
        return self.task.partition("/")[0]

    @property
    def step(self) -> int:
        """0: there is only one."""
        return int(self.task.partition("/")[2] or 0)


def timeline(tasks: Sequence[Task], cores: float | None = None, ranks_per_node: int = 1) -> list[Span]:
    """The spans of tasks, in their order.

    A rank runs its tasks one after the other, in the order of `tasks`, as it runs the calls of the controller. A task
    starts when it is the next one of all its ranks and the tasks that it names have ended. Ranks of a node share its
    `cores`: if those that run need more, each has the same share of what it needs (processor sharing, Kleinrock 1967),
    and a task progresses as fast as its slowest rank.

    Raises ValueError for a task that comes after one that is later in the list, or is not in it.

    Args:
        cores: cores of a node; None: each rank has what it needs.
    """
    _check(tasks)
    remaining, now = [task.seconds for task in tasks], 0.0
    starts, ends = dict[int, float](), dict[int, float]()
    while len(ends) < len(tasks):
        starts |= dict.fromkeys(_ready(tasks, starts, ends), now)
        running = [number for number in starts if number not in ends]
        rates = _rates([tasks[number] for number in running], cores, ranks_per_node)
        step = min(remaining[number] / rate for number, rate in zip(running, rates, strict=True))
        now += step
        for number, rate in zip(running, rates, strict=True):
            remaining[number] -= step * rate
            if remaining[number] <= 1e-12 * max(tasks[number].seconds, 1e-300):
                ends[number] = now
    return [Span(task.name, task.ranks, starts[place], ends[place]) for place, task in enumerate(tasks)]


def _check(tasks: Sequence[Task]) -> None:
    before: set[str] = set()
    for task in tasks:
        if task.name in before:
            raise ValueError(f"found two tasks {task.name}; expected each name once")
        missing = [name for name in task.after if name not in before]
        if missing:
            raise ValueError(f"task {task.name} is after {missing[0]}, which is not before it in the list")
        before.add(task.name)


def _ready(tasks: Sequence[Task], starts: Collection[int], ends: Collection[int]) -> list[int]:
    """Tasks that have not started, whose ranks are free and not due to run an earlier task first."""
    ended, ready, taken = {tasks[number].name for number in ends}, [], list[tuple[int, ...]]()
    for number, task in enumerate(tasks):
        if number not in ends:
            is_free = number not in starts and all(_are_disjoint(task.ranks, ranks) for ranks in taken)
            ready += [number] if is_free and ended.issuperset(task.after) else []
            taken.append(task.ranks)
    return ready


def _rates(running: Sequence[Task], cores: float | None, ranks_per_node: int) -> list[float]:
    """Progress of each task per second."""
    if cores is None:
        return [1.0] * len(running)
    needed: Counter[int] = Counter()
    for task in running:
        for node, ranks in _on_nodes(task.ranks, ranks_per_node):
            needed[node] += ranks * task.demand  # type: ignore[assignment]
    shares = {node: min(1.0, cores / demand) if demand > 0 else 1.0 for node, demand in needed.items()}
    return [min(shares[node] for node, _ in _on_nodes(task.ranks, ranks_per_node)) for task in running]


@lru_cache(maxsize=1024)
def _on_nodes(ranks: tuple[int, ...], ranks_per_node: int) -> tuple[tuple[int, int], ...]:
    """(node, number of the ranks on it)."""
    return tuple(Counter(rank // ranks_per_node for rank in ranks).items())


@lru_cache(maxsize=4096)
def _are_disjoint(ranks: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return set(ranks).isdisjoint(others)


GENERATES = ("gen", "gen_max", "judge")
STEPS = 4  # of an asynchronous job; the last ones take as long as any later one


def step_of(timed: Sequence[Timed], config: Config, cores: float | None) -> tuple[float, list[Span]]:
    """Seconds from the end of a step to that of the next one, and the step's timeline, in the job's mode."""
    mode, each = config.async_training.mode, config.job.ntasks_per_node
    if mode == "sync":
        spans = timeline(_synchronous(timed), cores, each)
        return max(span.end for span in spans), spans
    threshold = config.async_training.staleness_threshold
    steps = STEPS + (threshold if mode == "bounded_staleness" else 0)
    tasks = _one_step_off(timed, steps) if mode == "one_step_off" else _streaming(timed, steps, threshold)
    spans = timeline(tasks, cores, each)
    ends = [
        max(span.end for span in spans if span.step == step and not span.task.startswith(GENERATES))
        for step in range(1, steps + 1)
    ]
    half = steps // 2
    return (ends[-1] - ends[half - 1]) / (steps - half), spans


def _tasks(timed: Sequence[Timed], part: str, step: str, after: tuple[str, ...]) -> list[Task]:
    """The phases that are a part of the step: "gen", "score", "adv", or by their kind what reads the samples
    ("forward"), "train", "refit" and "save". Those of a part overlap on ranks of their own."""
    parts = {"gen": "gen", "gen_max": "gen", "judge": "score", "reward": "score", "adv": "adv"}
    mine = [it for it in timed if parts.get(it.name, it.kind) == part]
    return [Task(f"{it.name}{step}", it.ranks, it.cost.seconds, after, it.demand) for it in mine]


def _names(tasks: Iterable[Task]) -> tuple[str, ...]:
    return tuple(task.name for task in tasks)


def _sampled(timed: Sequence[Timed], step: str, after: tuple[str, ...]) -> list[Task]:
    """Generation, then scores."""
    generated = _tasks(timed, "gen", step, after)
    return generated + _tasks(timed, "score", step, _names(generated))


def _trained(timed: Sequence[Timed], step: str, first: tuple[str, ...]) -> list[Task]:
    """The trainer's part of a step, after the tasks `first`."""
    columns = _tasks(timed, "forward", step, first)
    advantages = _tasks(timed, "adv", step, _names(columns) or first)
    return columns + advantages + _tasks(timed, "train", step, _names(advantages))


def _synchronous(timed: Sequence[Timed]) -> list[Task]:
    tasks = _sampled(timed, "", ())
    tasks += _trained(timed, "", _names(tasks))
    tasks += _tasks(timed, "refit", "", _names(tasks))
    return tasks + _tasks(timed, "save", "", _names(tasks))


def _one_step_off(timed: Sequence[Timed], steps: int) -> list[Task]:
    """Step k waits for its samples, updates the engine's weights, has the next samples begun, and trains: see
    `hpcrl.run.rollouts.stepwise.OneStepOff`."""
    tasks = samples = _sampled(timed, "/1", ())
    trained: tuple[str, ...] = ()
    for step in range(1, steps + 1):
        mine = f"/{step}"
        refits = _tasks(timed, "refit", mine, (*_names(samples), *trained))
        samples = _sampled(timed, f"/{step + 1}", _names(refits))
        chain = _trained(timed, mine, _names(refits))
        saved = _tasks(timed, "save", mine, _names(chain))
        tasks = [*tasks, *refits, *samples, *chain, *saved]
        trained = _names([*chain, *saved])
    return tasks


def _streaming(timed: Sequence[Timed], steps: int, threshold: int) -> list[Task]:
    """Generation of the samples of step k begins with weights of version k - 1 - threshold, and a refit interrupts it:
    see `hpcrl.run.rollouts.streaming.Streaming`. The refit counts as the trainer's task and as work of the
    engine."""
    rest = [it for it in timed if it.kind in ("refit", "save")]
    interrupted = sum(it.cost.seconds for it in rest if it.kind == "refit")
    actor = next(it.ranks for it in timed if it.role == "actor")
    tasks: list[Task] = []
    trained: tuple[str, ...] = ()
    for step in range(1, steps + 1):
        version = step - 1 - threshold
        samples = _sampled(timed, f"/{step}", (f"update_weights/{version}",) if version >= 1 else ())
        samples[0] = replace(samples[0], seconds=samples[0].seconds + interrupted)
        chain = _trained(timed, f"/{step}", (*_names(samples), *trained))
        last = [Task(f"{it.name}/{step}", actor, it.cost.seconds, _names(chain)) for it in rest]
        tasks += [*samples, *chain, *last]
        trained = _names([*chain, *last])
    return tasks


APART = ("save_checkpoint",)  # between two steps


@dataclass(frozen=True)
class Prediction:
    """seconds: of a step, with its share of a save. phases: seconds by the name of `timing_s/<phase>`; those of phases
    that overlap add up to more than the step. parts: by phase, the share of its time by what limits it, see
    `hpcrl.forecast.time.cost.Cost`. spans: what the step's ranks do, from its start; of an asynchronous job, several
    steps, the tasks of step k named `<phase>/<k>`. roles: by phase, the role that works in it."""

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
        groups: list[tuple[tuple[str, ...], float, float]] = []
        for start, end, name in spans:
            if groups and start < groups[-1][2]:
                names, first, last = groups.pop()
                groups.append(((*names, name), first, max(last, end)))
            else:
                groups.append(((name,), start, end))
        return [(names, end - start) for names, start, end in groups]


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
    seconds, spans = step_of(inside, job.config, machine.node.cores)
    took = {name: span.end - span.start for name, span in _of_step(spans).items()}
    parts, phases = {}, {}
    for it in timed:
        ideal = it.cost.seconds
        phases[it.name] = took.get(it.name, ideal)
        cost = it.cost + Cost(waiting=max(0.0, phases[it.name] - ideal))
        parts[it.name] = cost.shares()
    seconds += sum(it.cost.seconds for it in timed if it.name in APART)
    tokens = job.derived.samples_per_step * lengths.mean
    roles = {it.name: it.role for it in timed}
    return Prediction(seconds, phases, parts, tokens / seconds, tuple(spans), roles)


LOAD_METRIC = "actor/moe_load_imbalance/mean"


def with_measured_load(config: Config, row: Mapping[str, float]) -> Config:
    """Return the config with the load imbalance of a step's metrics, to a tenth, or unchanged if they have none."""
    imbalance = row.get(LOAD_METRIC)
    if imbalance is None or not math.isfinite(imbalance):
        return config
    return with_keys(config, {"model.moe.load_imbalance": max(1.0, round(imbalance, 1))})


def forget_lengths() -> None:
    """Free what is cached by lengths: those of a real step do not come again."""
    for cached in (forward_cost, update_cost, packing, generation_cost, schedule):
        cached.cache_clear()


def _of_step(spans: Sequence[Span]) -> dict[str, Span]:
    """The span of each phase, of several steps in the last one but one, which has others beside it."""
    chosen = max((span.step for span in spans), default=0) - 1
    return {span.phase: span for span in spans if span.step in (0, chosen)}
