"""Efficiencies that are fitted to steps of a machine that is known, and cases worked out by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import yaml_core
from hpcrl.config.loader import dump_config
from hpcrl.forecast.time.calibrate import Measured, cause, fit, fitted_machine, misses, read_measured, sigma_of
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import LOAD_METRIC, predict
from hpcrl.jobs.train import Train
from hpcrl.machine.machine_file import Machine, read_machine
from tests.forecast.time.machines import cpu
from tests.forecast.time.test_step import job_of, lengths_of, machine_of

TRUE = {"gen": 0.6, "old_log_prob": 0.8, "values": 0.7, "update_actor": 0.5, "update_critic": 0.9}


def measured_on(machine: Machine, name: str, run: str, factor: float = 1.0, **changes: Any) -> Measured:
    job = job_of(name, **changes)
    lengths = lengths_of(job)
    found = predict(job, machine, lengths)
    return Measured(
        run, job, lengths, {name: factor * took for name, took in found.phases.items()} | {"step": found.step}
    )


@pytest.mark.parametrize("names", [("ppo_70b", "grpo_8b"), ("ppo_countdown_cpu", "one_step_off_countdown_cpu")])
def test_the_efficiencies_of_a_known_machine_are_found(names: tuple[str, ...]) -> None:
    base = machine_of(job_of(names[0]))
    true = base.model_copy(update={"efficiency": TRUE})
    found = fit([measured_on(true, name, name) for name in names], base)
    for phase, it in found.items():
        assert it.efficiency == pytest.approx(TRUE.get(phase, 1.0), rel=0.02), phase
    assert {"gen", "update_actor"} <= set(found)
    assert found["gen"].spread is None or found["gen"].spread < 0.02


def test_communication_has_an_efficiency_of_its_own() -> None:
    base = cpu(node__contention=2e-3)
    true = base.model_copy(update={"efficiency": TRUE, "communication": {"update_actor": 0.4}})
    runs = [measured_on(true, "grpo_countdown_cpu", f"tp{tp}", placement__actor__tp=tp) for tp in (1, 2)]
    found = fit(runs, base)
    assert found["update_actor"].efficiency == pytest.approx(TRUE["update_actor"], rel=0.1)
    assert 0.3 < found["update_actor"].communication < 0.6  # of two runs, drawn towards 1
    assert found["gen"].communication == pytest.approx(1.0)
    assert not list(misses(runs, fitted_machine(base, found)))


def test_runs_that_differ_by_a_factor_give_its_logarithm_as_the_error() -> None:
    base = cpu()
    runs = [measured_on(base, "grpo_countdown_cpu", "slow", 2.0), measured_on(base, "grpo_countdown_cpu", "fast", 0.5)]
    found = fit([*runs, runs[0]], base)  # two steps of one run count as one
    assert found["gen"].efficiency == pytest.approx(1.0)
    assert found["gen"].spread == pytest.approx(math.log(2) * math.sqrt(2) * math.sqrt(1.5))
    assert found["gen"].runs == 2
    assert {it.run for it in misses(runs, fitted_machine(base, found))} == {"slow", "fast"}


def test_a_cause_is_the_share_that_is_different() -> None:
    parts = {"a": {"communication": 0.6, "products": 0.4}, **dict.fromkeys("bcd", {"products": 1.0})}
    expected = "communication is 60% of it, and 0% in other runs: it is counted too low"
    assert cause(True, parts, "a") == expected
    assert cause(False, parts, "a") == expected.replace("low", "high")
    assert cause(True, parts, "b").startswith("its parts are those of the other runs")
    assert cause(True, {"a": parts["a"]}, "a") == "there is no other run to compare it with"


def test_sigma_of_the_longest() -> None:
    sigma = sigma_of(100.0, 400.0, 64)
    assert Lengths.log_normal(8, 100, sigma, 10**6).longest(64) == pytest.approx(400, rel=0.25)
    assert sigma_of(100.0, 100.0, 64) == 0.0


def make_run(folder: Path, times: dict[str, float]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(job_of("grpo_countdown_cpu").config))
    sizes = {"prompt_length/mean": 14.0, "response_length/mean": 12.0, "response_length/max": 20.0, LOAD_METRIC: 1.84}
    lines = [
        {"step": step, **sizes, **{f"timing_s/{name}": took for name, took in times.items()}} for step in range(1, 30)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hpcrl", "plan", *arguments], capture_output=True, text=True)


def test_a_command_fits_the_machine_to_runs(tmp_path: Path) -> None:
    machine, out = tmp_path / "machine.yaml", tmp_path / "fitted.yaml"
    machine.write_text(yaml_core.dump(cpu().model_dump(mode="json")))
    times = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.5, "step": 4.0}
    runs = [make_run(tmp_path / name, times) for name in ("first", "second")]
    done = plan("--calibrate", *map(str, runs), "--machine", str(machine), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "every phase of every run is within 25%" in done.stdout
    fitted, steps = read_machine(str(out)), read_measured(str(runs[0]), Train)
    assert fitted.measured and fitted.sources[-1].endswith("of first, second")
    assert len(steps) == 8 and steps[0].job.config.model.moe.load_imbalance == 1.8
    for name, took in times.items():
        found = predict(steps[0].job, fitted, steps[0].lengths).phases
        assert name == "step" or found[name] == pytest.approx(took, rel=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "found no config.yaml; expected the folder of a run of `hpcrl train`"),
        (lambda folder: make_run(folder / "run", {"step": 1.0}), "found no step with timing_s/gen in its metrics"),
    ],
)
def test_a_run_without_times_is_one_line(tmp_path: Path, make, message: str) -> None:
    done = plan("--calibrate", str(make(tmp_path)), "--machine", "dgx_h100")
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
