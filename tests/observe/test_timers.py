from __future__ import annotations

import pytest

from hpcrl.observe.record.progress import PhaseTimers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_nest_and_repeat():
    clock = Clock()
    timers = PhaseTimers(clock)
    with timers("step"):
        for _ in range(2):
            with timers("gen"):
                clock.now += 1.5
        clock.now += 1.0
    timers.add_bytes("refit", 100)
    timers.add_bytes("refit", 28)
    assert timers.collect() == {"timing_s/gen": 3.0, "timing_s/step": 4.0, "perf/bytes/refit": 128}
    assert timers.collect() == {}


def test_a_phase_that_raises_is_timed():
    clock = Clock()
    timers = PhaseTimers(clock)
    with pytest.raises(KeyError), timers("gen"):
        clock.now += 2.0
        raise KeyError
    assert timers.collect() == {"timing_s/gen": 2.0}
