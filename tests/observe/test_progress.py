from __future__ import annotations

import io

import pytest

from hpcrl.observe.record.progress import LongPhases, Progress, duration, validation_lines


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


ONE = {"val-core/openai/gsm8k/acc/mean@1": 0.5, "val-core/openai/gsm8k/acc/best@4/mean": 0.9, "val-aux/x/acc/mean@1": 1}


@pytest.mark.parametrize(
    ("metrics", "lines"),
    [
        ({}, []),
        ({"critic/score/mean": 1.0}, []),
        (ONE, ["openai/gsm8k  acc/mean@1 0.500"]),
        (
            {
                "val-core/math/reward/mean@4": 0.25,
                "val-core/b/acc/mean@4": 0.75,
                "val-core/b/acc/mean@1": 1.0,
                "val-core/aime/acc/mean@4": 0.25,
                **ONE,
            },
            [
                "mean of 4 data sources  acc/mean@1 0.750, acc/mean@4 0.500, reward/mean@4 0.250",
                "aime                    acc/mean@4 0.250",
                "b                       acc/mean@1 1.000, acc/mean@4 0.750",
                "math                    reward/mean@4 0.250",
                "openai/gsm8k            acc/mean@1 0.500",
            ],
        ),
    ],
)
def test_validation_has_a_line_for_each_data_source(metrics, lines):
    assert validation_lines(metrics) == lines


def test_a_long_phase_is_logged_when_its_time_has_doubled():
    clock = Clock()
    longest = {}
    phases = LongPhases(longest, lambda: 3, clock=clock)

    def seconds_of_lines(until: int) -> dict[float, str]:
        start, found = clock.now, {}
        while clock.now < start + until:
            clock.now += 1
            if line := phases.line():
                found[clock.now - start] = line
        return found

    with phases("step"):
        assert seconds_of_lines(100) == {}
        with phases("gen"):
            lines = seconds_of_lines(130)
            assert lines == {t: f"step 3: gen has run for {duration(t)}" for t in (30, 60, 120)}
            with phases("testing"):
                assert list(seconds_of_lines(40)) == [30]
        longest["gen"] = 50.0
        with phases("gen"):
            assert seconds_of_lines(110) == {100: "step 3: gen has run for 1m40s; the longest before took 50s"}
