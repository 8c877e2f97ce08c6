"""Busy seconds over ranks: their statistics, and who is said to be slow."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.controller.busy import BusyClock, BusyReport
from hpcrl.controller.controller import Controller
from hpcrl.run.performance import STEPS, Slow, Stragglers, busy_metrics, lasting, slow_ranks
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import WaitTime

UPDATE = "actor.update_actor"


def reports(*seconds: float) -> list[BusyReport]:
    return [BusyReport(rank, f"n{rank // 2}", {UPDATE: value}) for rank, value in enumerate(seconds)]


def test_time_that_others_took_and_inner_phases_do_not_count() -> None:
    now, waited = itertools.count(), WaitTime()
    clock = BusyClock(waited, lambda: float(next(now)))
    with clock.phase("outer"):  # 0
        with clock.phase("inner"):  # 1 to 2
            waited.seconds += 0.75
    assert clock.collect() == {"outer": 2.0, "inner": 0.25}
    waited.since = 0.5  # a command that runs while its rank waits for others
    with clock.phase("meanwhile"):
        pass
    assert clock.collect() == {"meanwhile": 0.0}


def test_statistics_are_over_the_ranks_that_were_there() -> None:
    metrics = busy_metrics([*reports(1.0, 2.0, 6.0), BusyReport(3, "n1", {"rollout.generate": 4.0})])
    assert metrics[f"perf/busy_s/{UPDATE}/min"] == 1.0 and metrics[f"perf/busy_s/{UPDATE}/max"] == 6.0
    assert metrics[f"perf/busy_s/{UPDATE}/median"] == 2.0 and metrics["perf/busy_s/rollout.generate/min"] == 4.0


def test_a_rank_is_compared_with_its_like() -> None:
    slow = {Slow(3, "n1", UPDATE): 1.5}
    assert slow_ranks(reports(10.0, 10.0, 10.0, 15.0), lambda phase, rank: 0) == slow
    stages = reports(10.0, 10.0, 10.0, 15.0, 15.0, 15.0)
    assert slow_ranks(stages, lambda phase, rank: rank // 3) == {}, "the last stage has the head"
    assert slow_ranks(reports(10.0, 15.0), lambda phase, rank: 0) == {}, "of two nobody can say"
    assert slow_ranks(reports(0.1, 0.1, 0.2), lambda phase, rank: 0) == {}, "too little to matter"


def test_only_most_of_the_steps_count() -> None:
    slow = Slow(1, "n0", UPDATE)
    assert list(lasting([{slow: 2.0}] * (STEPS // 2))) == []
    assert list(lasting([{}, {slow: 2.0}] + [{slow: 1.5}] * 5)) == [(slow, 6, 1.5)]


def test_who_stands_out_is_told_once_with_its_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fleet:
        """Rank 0's view of four ranks, of which rank 2 is slow."""

        ready = True

        def __getitem__(self, role: str) -> Any:
            return SimpleNamespace(layout=Layout((0, 1, 2, 3)))

        def ask_busy(self, step: int) -> Any:
            return SimpleNamespace(is_ready=self.ready, get=lambda: reports(1.0, 1.0, 3.0, 1.0))

    stragglers = Stragglers(cast(Controller, Fleet()), tmp_path, waits=True)
    for step in range(1, 2 * STEPS):
        assert stragglers.observe(step)[f"perf/busy_s/{UPDATE}/max"] == 3.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"rank 2 on n1 is 200% slower than its peers in {UPDATE}, in 6 of the last 6")
    assert line.endswith("--exclude=n1")
    assert (tmp_path / "stragglers.jsonl").read_text().count("\n") == 1

    fleet = Fleet()
    fleet.ready = False
    assert Stragglers(cast(Controller, fleet), tmp_path, waits=False).observe(1) == {}, "asks, and does not wait"
