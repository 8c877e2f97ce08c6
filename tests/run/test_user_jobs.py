"""A job in a user's file has what the built-in ones have: sections, placement, plan, dry run, submit."""

from __future__ import annotations

import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.cli import load_job
from hpcrl.config.loader import load_config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.runtime.exits import InputError

ROOT = Path(__file__).parents[2]
PRM = str(ROOT / "docs" / "examples" / "process_reward_model.py")
CONFIG = str(ROOT / "configs" / "reinforce_plus_plus_countdown_cpu.yaml")
VOCABULARY = "model.vocab_size=64"


def test_a_role_of_ones_own_has_a_section_a_placement_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_job(PRM)
    config = job.read_config(CONFIG, ["placement.prm.tp=2", "prm.weight=0.5", VOCABULARY])
    assert pickle.loads(pickle.dumps(config)) == config  # as it goes from rank 0 to the others
    assert config.run.job_file == PRM

    plan = TrainingPlan(config, tuple(job.own_specs()))
    assert plan.derived.roles["prm"].tp == 2
    phases = [phase.name for phase in plan.phases]
    assert "prm" in phases and "update_prm" not in phases and "save_prm" not in phases
    place = next(place for place in plan.places if "prm" in place.stages)
    on_device = plan.states["prm", 0]
    assert on_device.parameters > 0 == on_device.optimizer
    moved = TrainingPlan(job.read_config(CONFIG, ["prm.param_offload=true", VOCABULARY]), plan.own_roles)
    assert moved.on_host(moved.places[0]) > 0 == plan.on_host(place)


def test_a_role_may_have_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_job(PRM)
    config = job.read_config(CONFIG, ["prm.model={num_layers: 1, hidden_size: 64}", VOCABULARY])
    made = job(SimpleNamespace(), config, None, Namespace())
    made.inputs = SimpleNamespace(shape=SimpleNamespace(vocab_size=64, tokenizer_size=None), shapes={})
    shape = made.models.own_shapes()["prm"]
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (1, 64, 64)
    assert TrainingPlan(config, tuple(job.own_specs())).models["prm"].shape == shape


def test_a_worker_in_place_of_a_built_in_one_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own, built_in = load_job(str(ROOT / "docs" / "examples" / "grpo_by_hand.py")), load_job("train")
    plans = [TrainingPlan(job.read_config(CONFIG, [VOCABULARY]), tuple(job.own_specs())) for job in (own, built_in)]
    assert plans[0].rows() == plans[1].rows()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("prm.wieght=1", "unknown key prm.wieght; did you mean prm.weight?"),
        ("prm.max_token_len_per_gpu=0", "prm.max_token_len_per_gpu is 0; expected a number above 0"),
        ("placement.prn.tp=2", "unknown key placement.prn"),
    ],
)
def test_its_keys_are_checked(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line.replace("?", r"\?")):
        load_job(PRM).read_config(CONFIG, [override])


def test_its_layout_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_job(PRM)
    with pytest.raises(ConfigError, match="placement.prm.tp=3 does not divide"):
        job.check(job.read_config(CONFIG, ["placement.prm.tp=3", VOCABULARY]), 4)


def test_a_built_in_job_does_not_know_them() -> None:
    with pytest.raises(ConfigError, match="unknown key prm"):
        load_config(CONFIG, ["prm.weight=1"])


@pytest.mark.parametrize(("text", "line"), [("x = 1", "names no job"), ("import nothing", "cannot be loaded")])
def test_a_file_without_a_job_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "job.py").write_text(text)
    with pytest.raises(InputError, match=line):
        load_job(str(tmp_path / "job.py"))


def test_plan_and_submit_take_it(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "hpcrl", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    overrides = [VOCABULARY, f"run.dir={tmp_path}"]
    assert "\n  prm " in run("plan", f"{PRM}:{CONFIG}", *overrides)
    script = run("submit", "--dry-run", f"{PRM}:{CONFIG}", *overrides)
    assert '" run "$run/$bundle/config.yaml"' in script
