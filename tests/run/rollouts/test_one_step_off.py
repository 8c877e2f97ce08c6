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
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.rollouts.scoring import Steps
from hpcrl.run.rollouts.source import Collected, RolloutContext
from hpcrl.run.rollouts.stepwise import OneStepOff
from hpcrl.runtime.exits import InputError

LAST = 2


def without_step_three(step: int) -> Steps[Collected]:
    """Find no samples for the step after the last one."""
    yield "gen", Future(lambda: None, lambda: True)
    if step == LAST + 1:
        raise InputError("no prompt is left that differs")
    return SimpleNamespace(samples={"epoch": [0]}), {"step": float(step)}  # type: ignore[return-value]


def make(total_steps: int) -> tuple[OneStepOff, list[dict[str, float]]]:
    config = Config.model_validate({"async_training": {"mode": "one_step_off"}, "trainer": {"save_freq": 1}})
    anything: Any = SimpleNamespace(update_to=lambda version: None)
    sampler = OrderedSampler(10, 0, False)
    logged: list[dict[str, float]] = []
    context = RolloutContext(
        *(anything, config, anything, sampler, PhaseTimers(), (0,), anything, total_steps), log=logged.append
    )
    source = OneStepOff(context)
    source.gather = without_step_three  # type: ignore[method-assign]
    return source, logged


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_ends_well_without_samples_for_a_step_after_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    source, logged = make(LAST)
    for step in (1, 2):
        source.next(step)
    assert logged == [{"step": step, "training/epoch": 0.0} for step in (1, 2)]
    if in_background:
        source.context.controller.background()  # type: ignore[misc]
    with caplog.at_level(logging.WARNING), source.paused(LAST):  # for the last validation
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "no samples for a step after the last one: no prompt is left that differs"
    ]
    assert "ahead" not in source.save(tmp_path, LAST, source.between_steps())


def test_a_step_of_the_run_needs_its_samples() -> None:
    source, _ = make(LAST + 1)
    for step in (1, 2):
        source.next(step)
    with pytest.raises(InputError, match="no prompt is left"), source.paused(LAST):
        pass
