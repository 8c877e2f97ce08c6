"""The step as a file: tracks for Perfetto, and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.time.step import Span
from hpcrl.forecast.time.table import lines_of, timeline_events, tracks
from hpcrl.machine.machine_file import Machine
from hpcrl.runtime.exits import InputError
from tests.forecast.time.machines import cpu
from tests.forecast.time.test_step import job_of, predicted


def test_ranks_that_do_the_same_share_a_track() -> None:
    both, engine, trainer = (
        Span("update_weights/1", (0, 1, 2), 0, 1),
        Span("gen/2", (2,), 1, 3),
        Span("x", (0, 1), 1, 2),
    )
    assert tracks([both, Span("none", (0, 1, 2), 1, 1), engine, trainer]) == {
        (0, 1): [both, trainer],
        (2,): [both, engine],
    }


def test_a_track_shows_each_span_once_and_the_ends_of_steps() -> None:
    """A refit is on the tracks of the actor and the engine where it takes their time."""
    for name, with_refit in (("one_step_off_countdown_cpu", 2), ("async_countdown_cpu", 1), ("ppo_countdown_cpu", 1)):
        found = predicted(job_of(name))
        rows = tracks(found.spans).values()
        assert sum(any(span.task.startswith("update_weights") for span in row) for row in rows) == with_refit
        assert {span.task for row in rows for span in row} == {span.task for span in found.spans}
        for row in rows:
            assert all(one.end <= other.start + 1e-9 for one, other in zip(row, row[1:], strict=False))
        steps = {span.task.partition("/")[2] for span in found.spans if span.task.startswith("update_actor/")} - {""}
        ends = [event for event in timeline_events("a step", found) if event["ph"] == "i"]
        assert {event["name"] for event in ends} == {f"end of step {step}" for step in steps}


def options(path: Path, machine: Machine, *outs: Path) -> argparse.Namespace:
    file = path / "mine.yaml"
    file.write_text(machine.model_dump_json(), encoding="utf-8")
    return argparse.Namespace(machine=str(file), response_lengths="8,0.5", timeline=list(map(str, outs)))


def test_both_files(tmp_path: Path) -> None:
    job, trace, picture = job_of("one_step_off_countdown_cpu"), tmp_path / "step.json", tmp_path / "step.png"
    lines = lines_of(job, options(tmp_path, cpu(), trace, picture))
    assert [str(trace) in line or str(picture) in line for line in lines[-2:]] == [True, True]
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["ranks 1: rollout, actor", "ranks 2-3: rollout"]
    slices = [event for event in events if event["ph"] == "X"]
    for tid in (1, 2):
        mine = [event for event in slices if event["tid"] == tid]
        assert all(one["ts"] + one["dur"] <= two["ts"] + 0.01 for one, two in zip(mine, mine[1:], strict=False))
    update = next(event for event in slices if event["name"] == "update_actor" and event["args"]["step"] == 2)
    assert update["dur"] == pytest.approx(update["args"]["seconds"] * 1e6, abs=0.01)
    assert update["args"]["limited by"] and 0 < update["args"]["products"] < 1


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("grpo_countdown_cpu")
    for out, text in (
        (tmp_path / "step.svg", "ends in .png or .json"),
        (tmp_path / "no" / "x.png", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=text):
            lines_of(job, options(tmp_path, cpu(), out))
    with pytest.raises(ConfigError, match="found --timeline without --machine"):
        lines_of(job, argparse.Namespace(machine=None, response_lengths=None, timeline=["step.png"]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"needs matplotlib, which is not installed here"):
        lines_of(job, options(tmp_path, cpu(), tmp_path / "step.png"))
