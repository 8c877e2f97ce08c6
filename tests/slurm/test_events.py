"""The commands of `job.on_event` under Slurm, which ends all processes of a step with its ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import environment, hold, write_job

ONE_NODE = ("--nodes=1", "--ntasks-per-node=2")
NOTIFY = """#!/bin/sh
read -r line
case $HPCRL_EVENT in left|done|failed) sleep 1 ;; esac
env | grep -qE '^(PMI|SLURM_)' && exit 4
echo "$line" >>"$1"
"""
FAILING_UPDATE = Path(__file__).parents[1] / "run" / "failing_update.py"


def events(folder: Path) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(row["event"], row["step"]) for row in rows if row["event"] != "saved"]


def write_notify(folder: Path) -> str:
    (folder / "notify.sh").write_text(NOTIFY)
    (folder / "notify.sh").chmod(0o700)
    return "./notify.sh events.jsonl"


@pytest.mark.slow
def test_a_requeued_run(lab: Lab, tmp_path: Path) -> None:
    """A command that takes a second still runs to its end when a slice leaves, and at the end of the run. Meanwhile
    `hpcrl status` has the job's wall time from squeue."""
    lab = environment(lab, tmp_path)
    steps = {"total_training_steps": 3, "test_freq": -1}
    script = write_job(tmp_path, job={"on_event": write_notify(tmp_path)}, trainer=steps)
    job = lab.sbatch([*ONE_NODE, script, "watched"], cwd=tmp_path)
    hold(lab, job, tmp_path / "hold" / "2.update_actor", 1)
    status = lab.run(sys.executable, "-m", "hpcrl", "status", "runs", cwd=tmp_path).splitlines()[1]
    assert re.match(r"watched +running +1/3 +\S+ +\S+ +- +1 +59:\d\d ", status), status
    lab.run("scancel", "--signal=URG", job)
    lab.until(lambda: lab.restarts(job) == 1, "requeued", job)
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert events(tmp_path) == [("started", 0), ("left", 2), ("started", 2), ("done", 3)]
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {row["job"] for row in rows} == {job} and [row["restart"] for row in rows if row["event"] == "done"] == [1]
    assert rows[-1]["message"] == "watched is done: step 3 of 3"


@pytest.mark.slow
def test_a_rank_that_raises(lab: Lab, tmp_path: Path) -> None:
    lab = environment(lab, tmp_path)
    run = {"plugins": [str(FAILING_UPDATE)]}
    script = write_job(tmp_path, job={"on_event": write_notify(tmp_path)}, run=run, trainer={"test_freq": -1})
    job = lab.sbatch([*ONE_NODE, script, "watched"], cwd=tmp_path)
    assert lab.wait(job) == "FAILED"
    assert events(tmp_path) == [("started", 0), ("failed", 1)]
    assert '"message": "watched failed after step 1 of 12: ValueError: boom"' in (tmp_path / "events.jsonl").read_text()
