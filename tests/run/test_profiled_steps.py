"""Which steps are profiled, and what becomes of a trace that is cut short or cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.run.performance import ProfiledSteps


class FakeController:
    """Traces are written when `is_ready` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.traces: list[SimpleNamespace] = []

    def begin_profile(self) -> None:
        self.calls.append("begin")

    def end_profile(self, stem: str | None) -> SimpleNamespace:
        self.calls.append(f"end {stem and Path(stem).name}")
        self.traces.append(SimpleNamespace(is_ready=False, get=lambda: [None, "disk full", None, "quota"]))
        return self.traces[-1]


def test_a_step_that_is_left_has_no_trace() -> None:
    controller = FakeController()
    profiled = ProfiledSteps(controller, Path("run"), [2, 4], waits=True)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        profiled.begin(step)
        controller.calls.append(f"step {step}")
        profiled.end()
    profiled.begin(4)
    profiled.discard()
    assert controller.calls == ["step 1", "begin", "step 2", "end step_00000002", "step 3", "begin", "end None"]


def test_a_missing_trace_is_one_warning_as_soon_as_all_ranks_have_said(caplog: pytest.LogCaptureFixture) -> None:
    controller = FakeController()
    profiled = ProfiledSteps(controller, Path("run"), [1], waits=False)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4):
        profiled.begin(step)
        controller.traces[:1] and setattr(controller.traces[0], "is_ready", step > 2)
        profiled.end()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "2 of the traces of step 1 could not be written; training continues without them; rank 1: disk full"
    )
