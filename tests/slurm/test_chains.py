"""A chain of different jobs, from random weights to a policy, that is cut in each of its links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.data.row_file import RowFile
from tests.run.small_run import MODEL, PROMPTS
from tests.runtime.conftest import REPOSITORY
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import hold, lines

LINKS = {  # command -> where it is cut, and how: preference before its first checkpoint
    "sft": {"3.update": "time limit"},
    "preference": {"1.update": "kill"},
    "train": {"2.update_actor": "kill", "3.update_actor": "time limit"},
}
HELD_JOB = str(Path(__file__).with_name("held_job.py"))


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
            "run": {"dir": "runs", "plugins": [HELD_JOB]},
            "model": MODEL,
            "data": data | {"max_prompt_length": 16, "max_response_length": 8},
            **sections,
        }
        config["trainer"] = {"save_freq": 1, "walltime_margin": 5.0, **sections.get("trainer", {})}
        config["job"] = {"signal_seconds": 30, "max_relaunches": 0, **sections["job"]}
        (folder / f"{command}.yaml").write_text(yaml.safe_dump(config))


def submit(lab: Lab, folder: Path, name: str, links: Mapping[str, Sequence[str]]) -> list[str]:
    """Submits a chain of commands with these arguments, whose runs are <name>_<command>; the ids of its jobs."""
    words: list[str] = []
    for command, (template, *overrides) in links.items():
        words += ["--chain", f"{command}:{template}", *overrides, f"run.name={name}_{command}"]
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


def run_whole_and_cut(lab: Lab, folder: Path, links: Mapping[str, Sequence[str]]) -> None:
    """Run the chain twice, the second time with a kill, a time limit or both in each link; nothing is submitted again.
    Metrics are equal."""
    (folder / "hold").mkdir()
    more = {"PYTHONPATH": str(REPOSITORY), "HOLD_FOLDER": str(folder / "hold"), "HOME": str(folder)}
    # Not preloaded ranks: on two nodes the PMI of Slurm fails with their long addresses, even with more tries.
    lab = Lab(lab.folder, lab.env | more | {"HPCRL_START_TRIES": "9"})
    for job in submit(lab, folder, "whole", links):
        assert lab.wait(job) == "COMPLETED", said(folder)
    jobs = dict(zip(LINKS, submit(lab, folder, "cut", links), strict=True))
    for number, (command, job) in enumerate(jobs.items()):
        for count, (name, cut) in enumerate(LINKS[command].items(), 1):
            pid = hold(lab, job, folder / "hold" / name, number // 2 if cut == "kill" else 0)
            if count == len(LINKS[command]):
                found = states(lab, folder, "cut_preference")
                assert found == ["done"] * number + ["running"] + ["waiting"] * (2 - number)
            if cut == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
            lab.until(lambda job=job, count=count: lab.restarts(job) == count, f"requeued after a {cut}", job)
            lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        assert lab.wait(job) == "COMPLETED", said(folder)
        for name in LINKS[command]:
            (folder / "hold" / name).unlink()
    assert states(lab, folder, "cut_sft") == ["done"] * 3
    for command in LINKS:
        cut, whole = (folder / "runs" / f"{name}_{command}" for name in ("cut", "whole"))
        assert len(json.loads((cut / "slices.json").read_text())) == 1 + len(LINKS[command])
        assert lines(cut) == lines(whole), command


@pytest.mark.slow
def test_a_chain_that_is_cut_in_each_link_equals_an_unbroken_one(lab: Lab, tmp_path: Path) -> None:
    write_templates(tmp_path)
    run_whole_and_cut(lab, tmp_path, {command: [f"{command}.yaml"] for command in LINKS})


@pytest.mark.exhaustive
def test_a_chain_of_a_real_model(lab: Lab, tmp_path: Path) -> None:
    """configs/smollm2, of which each job takes a few small steps; minutes of two cores."""
    tool = [sys.executable, str(REPOSITORY / "tools" / "prepare_smollm2.py"), "--out", str(tmp_path / "models/smollm2")]
    made = subprocess.run(tool, capture_output=True, text=True)
    if "could not download" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    hpcrl(lab, tmp_path, "data", "sums", "--out", "data/sums", "--rows", "64", "--val-rows", "16")
    sums = RowFile(str(tmp_path / "data/sums/train.parquet"))
    rows = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][:-1] + "?"} for row in sums]
    (tmp_path / "data/sums/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["total_training_steps=4", "batch_size=4", "optim.lr=1e-6"]
    shared = [f"run.plugins=[{HELD_JOB}]", "trainer.walltime_margin=5", "job.signal_seconds=60"]
    shared += ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", "job.time=00:30:00"]
    batch = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "trainer.total_training_steps=4"]
    own = {
        "sft": ["sft", *(f"sft.{word}" for word in few), "sft.eval_freq=-1"],
        "preference": ["dpo", *(f"preference.{word}" for word in few), "data.train_files=[data/sums/pairs.jsonl]"],
        "train": ["grpo", *batch, "trainer.test_freq=4", "trainer.val_before_train=false"],
    }
    links = {
        command: [str(REPOSITORY / f"configs/smollm2/{name}.yaml"), *words, *shared]
        + ([] if command == "sft" else ["model.init_from=null"])
        for command, (name, *words) in own.items()
    }
    run_whole_and_cut(lab, tmp_path, links)


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("runs/*/slurm-*.out"))
