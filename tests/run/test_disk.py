"""What a run writes to its disk: how much it says that it will, what it removes, and who may read it."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpcrl.cli import load_job
from hpcrl.config.roles import ACTOR, REF, REWARD
from hpcrl.config.schema import Config, OptimConfig, TrainerConfig
from hpcrl.forecast.memory.state import kept_checkpoints
from hpcrl.run.inference import inside_run
from hpcrl.run.job import TrainingJob
from hpcrl.run.saver import disk_forecast
from hpcrl.runtime.world import World
from tests.run.small_run import MODEL, checkpoints, log_of, run_folder, train

STEPS = 5


def test_a_run_says_what_it_will_write_and_keeps_three_checkpoints_for_its_group(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run / "logs").mkdir(mode=0o700, parents=True)  # as of an earlier attempt
    run.chmod(0o700)
    (run / "logs" / "rank_00000.log").touch(mode=0o600)
    sections: dict[str, Any] = {
        "run": {"name": "ends", "dir": str(tmp_path / "runs"), "group_readable": True},
        "model": MODEL | {"hidden_size": 128, "ffn_hidden_size": 256},
        "algorithm": {"adv_estimator": "grpo"},
    }
    assert train(tmp_path, 2, trainer={"total_training_steps": STEPS}, **sections) == 0
    assert [name for name in checkpoints(tmp_path) if name != "latest"] == [
        f"step_{step:08d}" for step in range(STEPS - 2, STEPS + 1)
    ]
    log = log_of(tmp_path)
    assert len(re.findall("removing .*step_00000001: trainer.max_ckpt_to_keep=3 keeps the newest", log)) == 1
    assert log.count("removing ") == 1
    found = re.search(r"disk: ([\d.]+) MB per save, at most ([\d.]+) MB in 4 checkpoints, trainer.max_ckpt", log)
    assert found is not None, log
    saved = sum(path.stat().st_size for path in (run / "checkpoints" / f"step_{STEPS:08d}").rglob("*.distcp")) / 1e6
    assert abs(float(found[1]) - saved) < 0.1 * saved
    assert abs(float(found[2]) - 4 * float(found[1])) < 0.03
    written = [run, *run.rglob("*")]
    assert {path.name for path in written} >= {"config.yaml", "exit.json", "rank_00001"}
    assert [str(path) for path in written if path.stat().st_mode & 0o077 != (0o050 if path.is_dir() else 0o040)] == []


def test_the_folder_around_a_job_of_a_run_is_open_to_the_group_too(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path / "runs"), "name": "mine", "group_readable": True}})
    umask = os.umask(0o077)
    try:
        inside = inside_run(config, "generate").run
    finally:
        os.umask(umask)
    assert inside.dir == str(tmp_path / "runs" / "mine")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "runs", tmp_path / "runs" / "mine")} == {0o750}


def test_a_run_that_began_without_a_bound_keeps_all_checkpoints(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo"}}
    assert train(tmp_path, 1, trainer={"total_training_steps": 1, "max_ckpt_to_keep": None}, **sections) == 0
    for steps in (4, 5):
        assert train(tmp_path, 1, trainer={"total_training_steps": steps}, **sections) == 0
    assert len(checkpoints(tmp_path)) == 5 + len(["latest"])


def test_a_disk_without_space_is_named() -> None:
    config = Config.model_validate({"trainer": {"save_freq": 10, "max_ckpt_to_keep": 2}})
    text, missing = disk_forecast(config, save=10**9, num_kept=3, existing=1, archive=10**6, steps=100, free=10**9)
    assert "1.00 GB per save, at most 3.00 GB in 3 checkpoints" in text
    assert "rollouts at most 1.00 MB per step, 100.00 MB in 100 steps; 1.00 GB free" in text
    assert missing == 2 * 10**9 + 10**8 - 10**9
    everything = Config.model_validate({"trainer": {"save_freq": 10, "max_ckpt_to_keep": None}})
    text, missing = disk_forecast(everything, save=10**9, num_kept=10, existing=12, archive=0, steps=100, free=10)
    assert "all stay" in text and missing == -10
    never = disk_forecast(Config(), save=10**9, num_kept=0, existing=0, archive=0, steps=100, free=10)
    assert "1.00 GB per save, only if the run is stopped" in never[0] and never[1] == -10
    assert kept_checkpoints(TrainerConfig(), 100, saves_last=True) == 1


@pytest.mark.parametrize("name", ["sft", "preference", "rm"])
def test_the_forecast_has_the_optimizer_of_the_jobs_own_section(name: str) -> None:
    job = cast("type[TrainingJob]", load_job(name))
    config = job.schema().model_validate({name: {"optim": {"optimizer": "sgd"}}})
    made = job(cast("World", None), config, None, argparse.Namespace())
    spec = replace({"actor": ACTOR, "reward": REWARD}[job.trained_role or ""], trains=True)
    assert cast("OptimConfig", made.models.optimizer(spec)).optimizer == "sgd"
    assert made.models.optimizer(REF) is None
