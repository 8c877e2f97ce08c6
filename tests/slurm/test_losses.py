"""Losses at random times: a rank, all ranks of a node, a node with its memory; each costs at most one step."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from hpcrl.runtime.rank_status import FOLDER, read_heartbeat
from tests.slurm.conftest import Lab, start
from tests.slurm.small_ppo import environment, lines, write_job

STEPS, LOSSES = 80, 7  # of a job
BOUND = 1  # async_training.staleness_threshold
TP1 = dict.fromkeys(("actor", "ref", "critic", "rollout"), {"tp": 1, "pp": 1})
APART = {"pools": {"train": "1", "generate": "2"}, "rollout": {"pool": "generate"}}
APART |= dict.fromkeys(("actor", "ref", "critic"), {"pool": "train", "tp": 1, "pp": 1})


@dataclass
class Losing:
    """A job that loses something again and again. rows: what each loss cost, in steps and seconds."""

    lab: Lab
    folder: Path
    memory: Path
    job: str
    ranks: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "lost"

    @property
    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def last_step(self) -> int:
        path = self.run / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in whole), default=0)

    def lose(self, kind: str, rng: random.Random) -> None:
        """Wait for a step and a random time, lose something, and wait for the next step."""
        begin = self.last_step()
        self.lab.until(lambda: self.last_step() > begin, f"after step {begin}", self.job)
        time.sleep(rng.uniform(0.0, 2.0))
        seen, logged, at = self.output, self.last_step(), time.monotonic()
        beats = [read_heartbeat(self.run / FOLDER, rank) for rank in range(self.ranks)]
        running = [beat for beat in beats if beat is not None and psutil.pid_exists(beat.pid)]
        first = running[0].host
        hosts = sorted({beat.host for beat in running})
        if kind == "node":
            host = rng.choice([host for host in hosts if host != first])
            self.lab.lose(host)
            shutil.rmtree(self.memory / host, ignore_errors=True)
        else:
            chosen = rng.choice(running)
            for beat in running:
                if beat is chosen or (kind == "ranks of a node" and beat.host == chosen.host):
                    os.kill(beat.pid, 9)
        sign = self.until("srun: ", seen, at)
        again = self.until("of at most", seen, at)
        resumed = self.until("resuming after step ", seen, at)
        step = int(re.findall(r"resuming after step (\d+)", self.output)[-1])
        self.lab.until(lambda: self.last_step() > step, f"after step {step} again", self.job)
        self.rows.append(
            {"loss": kind, "lost_steps": logged - step, "found_s": sign, "script_s": again - sign}
            | {"load_s": resumed - again, "step_s": time.monotonic() - at - resumed}
        )
        assert logged - step <= 1, self.output

    def until(self, text: str, seen: str, at: float) -> float:
        """Seconds from the loss until the job's output has the text once more."""
        self.lab.until(lambda: self.output.count(text) > seen.count(text), text, self.job)
        return round(time.monotonic() - at, 1)


@pytest.fixture
def eight() -> Iterator[Lab]:
    """Eight nodes that a test may lose."""
    yield from start(8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spare", [True, False], ids=["spare", "no_spare"])
@pytest.mark.parametrize("mode", ["sync", "bounded_staleness"])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_losses_at_random_times(eight: Lab, tmp_path: Path, estimator: str, mode: str, spare: bool) -> None:
    """Without a spare node a job goes on with fewer replicas, whose sums have another order, so that metrics differ.
    With pools of fixed ranks it cannot, and only loses ranks."""
    is_async = mode != "sync"
    nodes = 3 if is_async else 2 if spare else 4
    memory = Path(tempfile.mkdtemp(prefix="losses_", dir="/dev/shm"))
    lab = environment(eight, tmp_path)
    lab = Lab(lab.folder, lab.env | {"HPCRL_MAX_RELAUNCHES": "50", "HPCRL_NODE_TIMEOUT": "5", "MEMORY": str(memory)})
    script = write_job(
        tmp_path,
        run={"watchdog": {"publish_seconds": 0.5}},
        placement=APART if is_async else TP1,
        async_training={"mode": mode, "staleness_threshold": BOUND},
        algorithm={"adv_estimator": estimator, "use_kl_in_reward": estimator == "gae"},
        trainer={
            "total_training_steps": STEPS,
            "save_freq": -1,
            "test_freq": -1,
            "val_before_train": False,
            "snapshot_freq": 1,
            "checkpoint": {"snapshot_dir": "$MEMORY/$SLURMD_NODENAME"},
        },
    )
    try:
        more = 8 - nodes if spare else 0
        options = ["--no-kill", f"--nodes={nodes + more}", "--ntasks-per-node=1", script]
        spares = Lab(lab.folder, lab.env | {"HPCRL_SPARE_NODES": str(more)})
        losing = Losing(lab, tmp_path, memory, spares.sbatch([*options, "lost"], tmp_path), nodes)
        rng = random.Random(f"{estimator} {mode} {spare}")
        for number in range(LOSSES):
            kinds = ["rank", "ranks of a node", *(["node"] if spare or (not is_async and number < 3) else [])]
            losing.lose(kinds[number % len(kinds)], rng)
        assert lab.wait(losing.job, 900) == "COMPLETED", losing.output
        assert lab.restarts(losing.job) == 0
        assert [line["step"] for line in lines(losing.run)] == list(range(1, STEPS + 1))
        if not is_async and spare:
            job = lab.sbatch([f"--nodes={nodes}", "--ntasks-per-node=1", script, "whole"], tmp_path)
            assert lab.wait(job, 900) == "COMPLETED"
            assert lines(losing.run) == lines(tmp_path / "runs" / "whole")
        if is_async:
            check_prompts(losing.run)
    finally:
        for row in losing.rows:
            print(json.dumps({"case": f"{estimator} {mode} {'spare' if spare else 'no spare'}", **row}))
        shutil.rmtree(memory, ignore_errors=True)


def check_prompts(run: Path) -> None:
    """No prompt was lost or taken twice, and none was staler than the bound."""
    uids: list[str] = []
    for step in range(1, STEPS + 1):
        _, samples, _ = read_step(step_path(run / "rollouts", step))
        uids += sorted(set(samples["uid"].tolist()))
        assert (step - 1 - samples["weight_version_min"]).max() <= BOUND
    assert len(uids) == len(set(uids)) == 8 * STEPS
