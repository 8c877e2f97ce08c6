"""When tasks start and end that need ranks, other tasks, and their nodes' cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


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


def timeline(tasks: Sequence[Task], cores: float | None = None, ranks_per_node: int = 1) -> list[Span]:
    """The spans of tasks, in their order.

    A rank runs its tasks one after the other, in the order of `tasks`, as it runs the calls of the controller. A task
    starts when it is the next one of all its ranks and the tasks that it names have ended. Ranks of a node share its
    `cores`: if those that run need more, each has the same share of what it needs (processor sharing, Kleinrock 1967),
    and a task progresses as fast as its slowest rank. cores None: each rank has what it needs.

    Raises ValueError for a task that comes after one that is later in the list, or is not in it.
    """
    _check(tasks)
    left = [task.seconds for task in tasks]
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    ended: set[str] = set()
    waiting, running, now = list(range(len(tasks))), list[int](), 0.0
    while waiting or running:
        _start(tasks, waiting, running, ended, starts, now)
        rates = _rates([tasks[number] for number in running], cores, ranks_per_node)
        step = min(left[number] / rate for number, rate in zip(running, rates, strict=True))
        now += step
        for number, rate in zip(running, rates, strict=True):
            left[number] -= step * rate
        for number in [number for number in running if left[number] <= 1e-12 * max(tasks[number].seconds, 1e-300)]:
            running.remove(number)
            ends[number] = now
            ended.add(tasks[number].name)
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


def _start(
    tasks: Sequence[Task], waiting: list[int], running: list[int], ended: set[str], starts: dict[int, float], now: float
) -> None:
    """Move tasks from `waiting` to `running` whose ranks are free and not due to run an earlier task first."""
    taken = [tasks[number].ranks for number in running]
    for number in list(waiting):
        task = tasks[number]
        is_free = all(_are_disjoint(task.ranks, ranks) for ranks in taken)
        if is_free and ended.issuperset(task.after):
            waiting.remove(number)
            running.append(number)
            starts[number] = now
        taken.append(task.ranks)


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
def _are_disjoint(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return set(some).isdisjoint(others)
