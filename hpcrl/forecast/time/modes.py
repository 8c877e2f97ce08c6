"""The tasks of a step, or of several, in each of a job's modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hpcrl.config.schema import AsyncTrainingConfig
from hpcrl.forecast.time.phases import Timed
from hpcrl.forecast.time.timeline import Span, Task, timeline

GENERATES = ("gen", "gen_max", "judge")
STEPS = 4  # of an asynchronous job; the last ones take as long as any later one


class Step(NamedTuple):
    """seconds: from the end of a step to that of the next one."""

    seconds: float
    spans: list[Span]


def step_of(timed: Sequence[Timed], cfg: AsyncTrainingConfig, cores: float | None, ranks_per_node: int) -> Step:
    """The step's timeline, in the job's mode."""
    mode, each, threshold = cfg.mode, ranks_per_node, cfg.staleness_threshold
    if mode == "sync":
        spans = timeline(_synchronous(timed), cores, each)
        return Step(max(span.end for span in spans), spans)
    steps = STEPS + (threshold if mode == "bounded_staleness" else 0)
    tasks = _one_step_off(timed, steps) if mode == "one_step_off" else _streaming(timed, steps, threshold)
    spans = timeline(tasks, cores, each)
    ends = [
        max(span.end for span in spans if span.task.endswith(f"/{step}") and not span.task.startswith(GENERATES))
        for step in range(1, steps + 1)
    ]
    half = steps // 2
    return Step((ends[-1] - ends[half - 1]) / (steps - half), spans)


def groups_of(timed: Sequence[Timed]) -> tuple[list[Timed], list[Timed], list[Timed], list[Timed]]:
    """Phases of samples; that read them, and overlap on ranks of their own; that need all columns, and overlap; and the
    rest, the refit and the archive."""
    samples = [it for it in timed if it.name in GENERATES or it.name == "reward"]
    columns = [it for it in timed if it.kind == "forward" and it.name != "adv" and it not in samples]
    updates = [it for it in timed if it.kind == "train"]
    rest = [it for it in timed if it.kind in ("refit", "save")]
    return samples, columns, updates, rest


def _chain(timed: Sequence[Timed], step: str, first: tuple[str, ...]) -> list[Task]:
    """The trainer's part of a step, after the tasks `first`."""
    _, columns, updates, _ = groups_of(timed)
    tasks = [_task(it, step, first) for it in columns]
    before = tuple(task.name for task in tasks) or first
    tasks += [_task(it, step, before) for it in timed if it.name == "adv"]
    after = tuple(task.name for task in tasks if task.name.startswith("adv")) or before
    return tasks + [_task(it, step, after) for it in updates]


def _task(it: Timed, step: str, after: tuple[str, ...]) -> Task:
    return Task(f"{it.name}{step}", it.ranks, it.cost.seconds, after, it.demand)


def _sampled(timed: Sequence[Timed], step: str, after: tuple[str, ...]) -> list[Task]:
    """Generation, then scores."""
    samples, _, _, _ = groups_of(timed)
    tasks: list[Task] = []
    for it in samples:
        scores = it.name in ("reward", "judge")
        before = tuple(task.name for task in tasks if task.name.startswith("gen")) if scores else after
        tasks.append(_task(it, step, before or after))
    return tasks


def _synchronous(timed: Sequence[Timed]) -> list[Task]:
    tasks = _sampled(timed, "", ())
    tasks += _chain(timed, "", tuple(task.name for task in tasks))
    for it in groups_of(timed)[3]:
        tasks.append(_task(it, "", tuple(task.name for task in tasks)))
    return tasks


def _one_step_off(timed: Sequence[Timed], steps: int) -> list[Task]:
    """Step k waits for its samples, updates the engine's weights, has the next samples begun, and trains: see
    `hpcrl.run.rollouts.stepwise.OneStepOff`."""
    rest = groups_of(timed)[3]
    tasks = _sampled(timed, "/1", ())
    trained: tuple[str, ...] = ()
    for step in range(1, steps + 1):
        mine = f"/{step}"
        samples = tuple(task.name for task in tasks if task.name.endswith(mine))
        refits = [_task(it, mine, (*samples, *trained)) for it in rest if it.kind == "refit"]
        begun = tuple(task.name for task in refits) or (*samples, *trained)
        chain = _chain(timed, mine, begun)
        tasks += [*refits, *_sampled(timed, f"/{step + 1}", begun), *chain]
        saved = [_task(it, mine, tuple(task.name for task in chain)) for it in rest if it.kind == "save"]
        tasks += saved
        trained = tuple(task.name for task in (*chain, *saved))
    return tasks


def _streaming(timed: Sequence[Timed], steps: int, threshold: int) -> list[Task]:
    """Generation of the samples of step k begins with weights of version k - 1 - threshold, and a refit interrupts it:
    see `hpcrl.run.rollouts.streaming.Streaming`. The refit counts as the trainer's task and as work of the
    engine."""
    rest = groups_of(timed)[3]
    interrupted = sum(it.cost.seconds for it in rest if it.kind == "refit")
    actor = next(it.ranks for it in timed if it.role == "actor")
    tasks: list[Task] = []
    trained: tuple[str, ...] = ()
    for step in range(1, steps + 1):
        version = step - 1 - threshold
        begun = (f"update_weights/{version}",) if version >= 1 else ()
        samples = _sampled(timed, f"/{step}", begun)
        samples[0] = replace(samples[0], seconds=samples[0].seconds + interrupted)
        chain = _chain(timed, f"/{step}", (*(task.name for task in samples), *trained))
        ended = tuple(task.name for task in chain)
        last = [Task(f"{it.name}/{step}", actor, it.cost.seconds, ended) for it in rest]
        tasks += [*samples, *chain, *last]
        trained = tuple(task.name for task in (*chain, *last))
    return tasks
