"""tools/bench layouts writes lines that tools/compare_layouts.py compares."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from hpcrl.config import yaml_core
from hpcrl.forecast.time.step import predict
from hpcrl.machine.machine_file import Machine, read_machine
from tests.forecast.time.machines import cpu

TOOLS = Path(__file__).parents[2] / "tools"
DOCS = TOOLS.parent / "docs"
EFFICIENCY = {"gen": 0.4, "old_log_prob": 0.6, "update_actor": 0.5}


def tool(name: str, *arguments: object) -> str:
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_times_of_a_known_machine_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_layouts
    from bench.layouts import cases

    base = cpu()
    true = base.model_copy(update={"efficiency": EFFICIENCY})
    machine, lines, plot = tmp_path / "machine.yaml", tmp_path / "lines.jsonl", tmp_path / "plot.png"
    machine.write_text(yaml_core.dump(base.model_dump(mode="json")))
    chosen = [case for case in cases() if case.lengths == "fixed" or case.name in compare_layouts.CALIBRATED]
    with lines.open("w") as file:
        for case in chosen[::2] + [case for case in chosen if case.name in compare_layouts.CALIBRATED]:
            took = phases_of(case, true)
            for start, slower in enumerate((1.0, 1.0, 1.4)):  # one of three starts of the ranks
                phases = {name: [slower * each for each in seconds] for name, seconds in took.items()}
                line = {"case": case.name, "repeat": start, "start": start, "phases": phases}
                file.write(json.dumps(line) + "\n")
    said = tool("compare_layouts.py", lines, "--machine", machine, "--plot", plot, "--misses", 1)
    assert "fitted to 6 others; spread of the repeats 0.0%" in said
    step = next(line for line in said.splitlines() if line.startswith("  step"))
    assert float(step.split("median error")[1].split("%")[0]) < 2.0
    assert "rank correlation 1.00" in said or "rank correlation 0.99" in said
    assert plot.stat().st_size > 10_000


def test_recorded_layouts_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/planning.md has the figures. The aims are a chosen step within 1.1 of the best and a correlation of 0.85,
    which some groups miss; these bounds are what the model reaches now, with room for its next change."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_layouts
    from bench.harness import read_lines

    measured = compare_layouts.measurements(read_lines(DOCS / "layouts.jsonl"))
    held_out, _ = compare_layouts.compared(measured, read_machine(str(DOCS / "layouts_machine.yaml")))
    assert len(held_out) == 184
    assert median(abs(it.error) for it in held_out) < 0.15
    of_phase: dict[str, list[float]] = defaultdict(list)
    groups = defaultdict(list)
    for it in held_out:
        groups[it.case.model, it.case.algorithm, it.case.lengths].append(it)
        for name, error in it.phase_errors().items():
            of_phase[name].append(abs(error))
    assert {name: median(errors) < 0.25 for name, errors in of_phase.items()} == dict.fromkeys(of_phase, True)
    for group in groups.values():
        chosen = min(group, key=lambda it: it.predicted.step)
        assert chosen.step < 1.2 * min(it.step for it in group)
        assert compare_layouts.correlation(group) > 0.75


def test_no_recorded_layout_takes_more_memory_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_layouts
    from bench.harness import read_lines

    shares = compare_layouts.memory(read_lines(DOCS / "layouts.jsonl"))
    assert len(shares) > 300
    assert max(shares.values()) < 1.1


def phases_of(case, machine: Machine) -> dict[str, list[float]]:
    from bench.layouts import config_of
    from compare_layouts import lengths_of

    from hpcrl.forecast.memory.memory import TrainingPlan

    found = predict(TrainingPlan(config_of(case, Path("/nowhere"))), machine, lengths_of(case))
    return {name: [seconds, seconds] for name, seconds in found.phases.items()} | {"step": [found.step, found.step]}


@pytest.mark.exhaustive
def test_a_case_is_measured(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    case = "dense grpo log-normal: dp, engine tp1"
    for _ in range(2):  # the second call has nothing left to do
        tool("bench", "layouts", "--out", lines, "--repeats", 1, "--only", f"^{case}$")
    (timed,) = (json.loads(line) for line in lines.read_text().splitlines())
    assert timed["case"] == case
    assert {"gen", "old_log_prob", "update_actor", "step"} <= set(timed["phases"])
