"""The templates on a real Slurm, as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab

ROOT = Path(__file__).parents[2]
LINKED = ("configs", "hpcrl", "docs", "slurm", "tools", ".venv")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout after tools/environment.sh, in which nothing has run."""
    for name in LINKED:
        (tmp_path / name).symlink_to(Path(sys.prefix) if name == ".venv" else ROOT / name)
    return tmp_path


def output(clone: Path, job: str) -> str:
    return "\n".join(path.read_text() for path in clone.glob(f"slurm-*{job}*.out"))


@pytest.mark.parametrize(("template", "ranks", "nodes"), [("ppo_70b", 64, 8), ("grpo_8b", 16, 2)])
def test_large_templates_are_accepted_and_place_every_rank(
    large_lab: Lab, clone: Path, monkeypatch: pytest.MonkeyPatch, template: str, ranks: int, nodes: int
) -> None:
    monkeypatch.setitem(large_lab.env, "HPCRL_DRY_RUN", "1")
    job = large_lab.sbatch([f"slurm/{template}.sbatch"], clone)
    state, said = large_lab.wait(job), output(clone, job)
    assert state == "COMPLETED", said
    assert f"one world of {ranks} ranks on {nodes} node(s), 8 on each" in said
    assert "all ranks agree on all coordinates and groups; none imported torch" in said
    assert not (clone / "runs").exists()


@pytest.mark.slow
def test_the_main_job_runs_from_a_fresh_clone(lab: Lab, clone: Path) -> None:
    """On 2 nodes x 2 ranks."""
    few = ["sft.total_training_steps=2", "sft.eval_freq=-1"]
    few += ["data.train_max_samples=256", "data.train_batch_size=64", "actor.ppo_mini_batch_size=32"]
    few += ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    job = lab.sbatch(["slurm/ppo_countdown_cpu.sbatch", *few], clone)
    assert lab.wait(job) == "COMPLETED", output(clone, job)
    run = clone / "runs" / "ppo_countdown"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert len(list((run / "logs").glob("rank_*.log"))) == 4
    assert "on 2 node(s)" in output(clone, job)


@pytest.mark.slow
def test_a_submitted_chain_runs_from_its_bundles(lab: Lab, clone: Path) -> None:
    """The second job, in a user's file, starts from what the first one makes, under a name that a shell would stumble
    over. Neither misses what the bundles were made from."""
    subprocess.run(
        [sys.executable, "tools/prepare_countdown.py", "--out", "data/countdown", "--files", "train", "val", "sft"],
        cwd=clone,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    stages = ["sft:configs/sft_countdown_cpu.yaml", "sft.total_training_steps=1", "sft.eval_freq=-1"]
    stages += ["--chain", "docs/examples/grpo_by_hand.py:configs/grpo_countdown_cpu.yaml"]
    stages += ["run.name=it's; $(touch x)"]
    stages += ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    ran = subprocess.run(
        [sys.executable, "-m", "hpcrl", "submit", *stages, "--nodes=1", "--ntasks-per-node=2"],
        cwd=clone,
        env=lab.env | {"HOME": str(clone)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for name in ("configs", "data", "docs", "slurm"):
        (clone / name).rename(clone / f"former_{name}")
    first, second = (line.split(": job ")[1].split(",")[0] for line in ran.stdout.splitlines())
    assert lab.wait(first) == "COMPLETED"
    run = clone / "runs" / "it's; $(touch x)"
    said = "\n".join(path.read_text() for path in run.glob("slurm-*.out"))
    assert lab.wait(second) == "COMPLETED", said
    assert (run / "checkpoints" / "latest").read_text() == "step_00000001\n"
    assert not list(clone.rglob("x")) and "hpcrl" in os.listdir(run / "bundle" / "code")
