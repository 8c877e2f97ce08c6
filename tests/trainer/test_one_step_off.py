"""Samples ahead of a step that the run may not reach."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.schema import Config
from hpcrl.controller.controller import Future
from hpcrl.data.sampler import OrderedSampler
from hpcrl.runtime.exits import InputError
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.trainer.experience import Collected
from hpcrl.trainer.one_step_off import OneStepOff
from hpcrl.trainer.pending import Steps

LAST = 2


class WithoutStepThree(OneStepOff):
    def gather(self, step: int) -> Steps[Collected]:
        yield "gen", Future(lambda: None, lambda: True)
        if step == LAST + 1:
            raise InputError("no prompt is left that differs")
        return SimpleNamespace(), {"step": float(step)}  # type: ignore[return-value]


def loop(total_steps: int) -> WithoutStepThree:
    config = Config.model_validate({"async_training": {"mode": "one_step_off"}, "trainer": {"save_freq": 1}})
    anything: Any = SimpleNamespace(bring=lambda version: None)
    sampler = OrderedSampler(10, 0, False)
    return WithoutStepThree(anything, config, anything, sampler, PhaseTimers(), (0,), anything, total_steps)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_ends_well_without_samples_for_a_step_after_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    experience = loop(LAST)
    for step in (1, 2):
        assert experience.collect(step)[1] == {"step": step}
    if in_background:
        experience.controller.background()  # type: ignore[misc]
    with caplog.at_level(logging.WARNING), experience.paused(LAST):  # for the last validation
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "no samples for a step after the last one: no prompt is left that differs"
    ]
    assert "ahead" not in experience.save(tmp_path, LAST, experience.between_steps())


def test_a_step_of_the_run_needs_its_samples() -> None:
    experience = loop(LAST + 1)
    for step in (1, 2):
        experience.collect(step)
    with pytest.raises(InputError, match="no prompt is left"), experience.paused(LAST):
        pass
