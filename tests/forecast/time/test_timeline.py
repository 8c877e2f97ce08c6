"""The timeline against a simulation in small steps of time, and against cases worked out by hand."""

from __future__ import annotations

import random

import pytest

from hpcrl.forecast.time.step import Task, timeline

DT = 1e-3


def simulated(tasks: list[Task], cores: float, ranks_per_node: int) -> dict[str, float]:
    """When each task ends."""
    left = {task.name: task.seconds for task in tasks}
    ends: dict[str, float] = {}
    now = 0.0
    while left:
        running, taken = [], set[int]()
        for task in tasks:
            if task.name in left:
                if taken.isdisjoint(task.ranks) and all(name in ends for name in task.after):
                    running.append(task)
                taken.update(task.ranks)
        needed: dict[int, float] = {}
        for task in running:
            for rank in task.ranks:
                needed[rank // ranks_per_node] = needed.get(rank // ranks_per_node, 0) + task.demand
        now += DT
        for task in running:
            rate = min(min(1.0, cores / needed[rank // ranks_per_node]) for rank in task.ranks)
            left[task.name] -= rate * DT
            if left[task.name] <= DT / 2:
                del left[task.name]
                ends[task.name] = now
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_as_in_small_steps(seed: int) -> None:
    drawn, tasks = random.Random(seed), list[Task]()
    for number in range(7):
        ranks = tuple(sorted(drawn.sample(range(6), drawn.randint(1, 4))))
        after = tuple(task.name for task in tasks if drawn.random() < 0.25)
        tasks.append(Task(str(number), ranks, drawn.uniform(0.1, 1.0), after, drawn.choice([0.5, 1.0])))
    expected = simulated(tasks, 2.0, 3)
    found = {span.task: span.end for span in timeline(tasks, 2.0, 3)}
    assert found == pytest.approx(expected, abs=30 * DT)


def test_pools_overlap_unless_they_share_cores() -> None:
    tasks = [Task("a", (0, 1), 2.0), Task("b", (2, 3), 2.0)]
    assert [span.end for span in timeline(tasks)] == [2.0, 2.0]
    assert [span.end for span in timeline(tasks, 2.0, 4)] == [4.0, 4.0]
    assert [span.end for span in timeline(tasks, 2.0, 2)] == [2.0, 2.0]  # on two nodes


def test_a_shorter_task_leaves_its_cores_to_the_other() -> None:
    short, long = timeline([Task("a", (0,), 1.0), Task("b", (1,), 3.0)], 1.0, 2)
    assert (short.end, long.end) == (2.0, 4.0)


def test_ranks_run_their_tasks_in_order() -> None:
    spans = timeline([Task("a", (0,), 1.0), Task("b", (0, 1), 1.0), Task("c", (1,), 1.0), Task("d", (2,), 5.0, ("a",))])
    assert [(span.start, span.end) for span in spans] == [(0, 1), (1, 2), (2, 3), (1, 6)]


def test_tasks_that_cannot_be_ordered() -> None:
    with pytest.raises(ValueError, match="after c"):
        timeline([Task("a", (0,), 1.0, ("c",))])
    with pytest.raises(ValueError, match="two tasks a"):
        timeline([Task("a", (0,), 1.0), Task("a", (1,), 1.0)])
