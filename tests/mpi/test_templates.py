"""Every CPU template in configs/ runs: two steps of each, on smaller batches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpcrl.cli import load_job
from hpcrl.runtime.job import run_directory
from tests.mpi.lab import run_job

ROOT = Path(__file__).parents[2]
WIDE = ["async_countdown_cpu", "one_step_off_countdown_cpu"]  # rank 0 leads, and generation has ranks of its own
OTHERS = sorted({path.stem for path in (ROOT / "configs").glob("*_cpu.yaml")} - {*WIDE})

# Two steps of SFT leave a model that answers nothing right: here the samples of a prompt differ all the same.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kind = sum(map(ord, solution_str)) % 7
    return {"score": kind / 7, "acc": float(kind > 3), "format": float(kind % 2)}
"""
SMALL = [
    *("data.train_max_samples=64", "data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "data.val_max_samples=8"),
    *("trainer.test_freq=2", "trainer.val_before_train=false", "trainer.save_freq=2"),
    *("reward.custom_reward_function.path=score.py", "reward.num_workers=1"),
]
SMALL_SUPERVISED = ["batch_size=8", "total_training_steps=2", "eval_freq=2", "eval_samples=8"]
# first word of the template's name -> command
SUPERVISED = {"sft": "sft", "rm": "rm", "dpo": "preference", "kto": "preference"}
COMMANDS = {**SUPERVISED, "online": "online_dpo"}


@pytest.fixture(scope="module")
def folder(world, countdown_files: Path, tmp_path_factory) -> Path:
    """A working directory with the templates and the data that they name."""
    found = Path(world.broadcast_object(str(tmp_path_factory.mktemp("templates")) if world.rank == 0 else None))
    if world.rank == 0:
        (found / "configs").symlink_to(ROOT / "configs")
        (found / "data").mkdir()
        (found / "data" / "countdown").symlink_to(countdown_files)
        (found / "score.py").write_text(SCORE)
    world.barrier()
    return found


@pytest.mark.slow
@pytest.mark.world(2)
@pytest.mark.parametrize("template", OTHERS)
def test_a_template_runs_two_steps(world, folder: Path, monkeypatch, template: str) -> None:
    monkeypatch.chdir(folder)
    run_two_steps(world, template)


@pytest.mark.slow
@pytest.mark.world(4)
@pytest.mark.parametrize("template", WIDE)
def test_a_template_of_four_ranks_runs_two_steps(world, folder: Path, monkeypatch, template: str) -> None:
    monkeypatch.chdir(folder)
    run_two_steps(world, template)


def run_two_steps(world, template: str) -> None:
    """Run the templates whose weights this one starts with, then this one; each at most once in a session."""
    kind = template.split("_")[0]
    command = COMMANDS.get(kind, "train")
    supervised = [f"{command}.{setting}" for setting in SMALL_SUPERVISED]
    small = SMALL + (supervised if kind in SUPERVISED else ["trainer.total_training_steps=2"])
    job = load_job(command)
    config = job.prepare(job.read_config(f"configs/{template}.yaml", small))
    saved = run_directory(config) / "checkpoints" / "step_00000002" / "manifest.json"
    if world.broadcast_object(saved.exists() if world.rank == 0 else None):
        return
    for section in (config.model, config.teacher, config.reward.reward_model, config.reward.judge):
        if section.init_from:
            run_two_steps(world, f"{Path(section.init_from).name}_cpu")
    run_job(world, command, config)
    lines = [json.loads(line) for line in (run_directory(config) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    losses = [value for line in lines for name, value in line.items() if name.endswith(("/loss", "/grad_norm"))]
    assert losses and all(value is not None and math.isfinite(value) for value in losses)
    assert max(value for line in lines for name, value in line.items() if name.endswith("/grad_norm")) > 0
    assert saved.exists()
