from __future__ import annotations

import io

import pytest

from hpcrl.observe.record.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(seconds_per_step: float, first: int = 1, total: int = 100) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(total, "ppo", first, stream=stream, clock=clock)
    for step in range(first, total + 1):
        clock.now += seconds_per_step
        progress.update(step, {"reward": step / 1000})
    progress.close()
    return stream.getvalue().splitlines()


def test_slow_steps_have_a_line_each():
    lines = run(10.0)
    assert len(lines) == 100
    assert lines[24] == "ppo 25/100 | 10 s/step | ETA 12m30s | reward 0.025"


def test_fast_steps_share_a_line_and_the_last_has_its_own():
    lines = run(0.1)
    assert lines[0].startswith("ppo 1/100")
    assert lines[-1] == "ppo 100/100 | 0.1 s/step | ETA 0s | reward 0.1"
    assert len(lines) <= 4


def test_eta_of_a_resumed_run_counts_its_own_steps():
    assert run(10.0, first=91)[0] == "ppo 91/100 | 10 s/step | ETA 1m30s | reward 0.091"


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    progress = Progress(4, "sft", stream=stream)
    for step in range(1, 5):
        progress.update(step, {"loss": 0.5})
    progress.close()
    assert "4/4" in stream.getvalue() and "sft" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.7, "1m00s"), (185, "3m05s"), (7200, "2h00m")])
def test_duration(seconds, text):
    assert duration(seconds) == text
