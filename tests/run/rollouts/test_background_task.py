"""Steps that go on while something else is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hpcrl.controller.controller import Controller, Future
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.rollouts.scoring import BackgroundTask, Steps


def test_steps_go_on_when_their_futures_are_ready_and_wait_only_when_asked() -> None:
    ready = {"a": True, "b": False}
    begun: list[str] = []

    def future(name: str) -> Future[Any]:
        begun.append(name)
        return Future(lambda: name.upper(), lambda: ready[name])

    def steps() -> Steps[str]:
        first = yield "gen", future("a")
        second = yield "reward", future("b")
        return str(first + second)

    controller, clock = SimpleNamespace(background=None), iter(range(100))
    pending = BackgroundTask(steps(), timers := PhaseTimers(lambda: next(clock))).in_background(
        cast(Controller, controller)
    )
    assert begun == ["a"]
    controller.background()
    assert begun == ["a", "b"]
    controller.background()
    assert pending.get() == "AB" and pending.get() == "AB"
    assert timers.collect() == {"timing_s/reward": 1}  # the other one was there when it was wanted
