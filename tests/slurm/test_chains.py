"""A chain of different jobs, from random weights to a policy, that is cut in each of its links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run.small_run import MODEL, PROMPTS
from tests.runtime.conftest import REPOSITORY
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import hold, lines

LINKS = {  # command -> where it is killed, and where its time ends
    "sft": ("2.update", "3.update"),
    "preference": ("any.update", "any.evaluate"),  # before its first checkpoint, and after step 2
    "train": ("2.update_actor", "3.update_actor"),
}


def write_templates(folder: Path) -> None:
    """<command>.yaml of three short jobs, on 1, 2 and 2 ranks and 1, 1 and 2 nodes."""
    rows = [
        {**row, "answer": f"{number}+1", "chosen": f"{number}+1", "rejected": f"{number}-1"}
        for number, row in enumerate(PROMPTS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"], "train_batch_size": 8}
    steps: dict[str, Any] = {"total_training_steps": 4, "batch_size": 4, "eval_freq": 2, "optim": {"lr": 1e-3}}
    own: dict[str, dict[str, Any]] = {
        "sft": {"sft": steps, "job": {"nodes": 1}},
        "preference": {
            "preference": steps,
            "placement": {"actor": {"tp": 2}, "ref": {"pp": 2}},
            "job": {"ntasks_per_node": 2},
        },
        "train": {
            "rollout": {"n": 2},
            "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-3}},
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True},
            "placement": {"actor": {"tp": 2}, "rollout": {"tp": 1}},
            "job": {"nodes": 2},
            "trainer": {"total_training_steps": 4, "test_freq": 2},
        },
    }
    for command, sections in own.items():
        config: dict[str, Any] = {
            "run": {"dir": "runs", "plugins": [str(Path(__file__).with_name("held_job.py"))]},
            "model": MODEL,
            "data": data | {"max_prompt_length": 16, "max_response_length": 8},
            **sections,
        }
        config["trainer"] = {"save_freq": 1, "walltime_margin": 5.0, **sections.get("trainer", {})}
        config["job"] = {"signal_seconds": 30, **sections["job"]}
        (folder / f"{command}.yaml").write_text(yaml.safe_dump(config))


def submit(lab: Lab, folder: Path, name: str) -> list[str]:
    """Submits the chain with runs <name>_<command>; gives the ids of its jobs."""
    words: list[str] = []
    for command in LINKS:
        words += ["--chain", f"{command}:{command}.yaml", f"run.name={name}_{command}"]
    ran = hpcrl(lab, folder, "submit", *words[1:])
    return [line.split(": job ")[1].split(",")[0] for line in ran.splitlines()]


def hpcrl(lab: Lab, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "hpcrl", *arguments]
    ran = subprocess.run(command, cwd=folder, env=lab.env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def states(lab: Lab, folder: Path, run: str) -> list[str]:
    """The last column of `hpcrl status`, by its first word."""
    table = hpcrl(lab, folder, "status", f"runs/{run}").split("\n\n")[0].splitlines()[1:]
    return [line.split(maxsplit=7)[7].split()[0] for line in table]


@pytest.mark.slow
def test_a_chain_that_is_cut_in_each_link_equals_an_unbroken_one(lab: Lab, tmp_path: Path) -> None:
    """One kill and one time limit in each link, and nothing is submitted again."""
    (tmp_path / "hold").mkdir()
    more = {"PYTHONPATH": str(REPOSITORY), "HOLD_FOLDER": str(tmp_path / "hold"), "HOME": str(tmp_path)}
    # Not preloaded ranks: on two nodes the PMI of Slurm fails with their long addresses, even with more tries.
    lab = Lab(lab.folder, lab.env | more | {"HPCRL_START_TRIES": "9"})
    write_templates(tmp_path)
    for job in submit(lab, tmp_path, "whole"):
        assert lab.wait(job) == "COMPLETED", said(tmp_path)
    places = {command: [tmp_path / "hold" / name for name in names] for command, names in LINKS.items()}
    jobs = dict(zip(LINKS, submit(lab, tmp_path, "cut"), strict=True))
    for number, (command, job) in enumerate(jobs.items()):
        os.kill(hold(lab, job, places[command][0], number // 2), signal.SIGKILL)
        lab.until(lambda job=job: lab.restarts(job) == 1, "requeued after a kill", job)
        hold(lab, job, places[command][1], 0)
        found = states(lab, tmp_path, "cut_preference")
        assert found == ["done"] * number + ["running"] + ["waiting"] * (2 - number)
        lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        lab.until(lambda job=job: lab.restarts(job) == 2, "requeued at its time limit", job)
        lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        assert lab.wait(job) == "COMPLETED", said(tmp_path)
        for place in places[command]:
            place.unlink()
    assert states(lab, tmp_path, "cut_sft") == ["done"] * 3
    for command in LINKS:
        cut, whole = (tmp_path / "runs" / f"{name}_{command}" for name in ("cut", "whole"))
        assert len(json.loads((cut / "slices.json").read_text())) == 3
        assert lines(cut) == lines(whole), command


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("runs/*/slurm-*.out"))
