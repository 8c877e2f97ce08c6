"""Ranks that die or hang in the middle of a run, on Slurm."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from hpcrl.runtime.rank_status import read_heartbeat
from tests.run.test_hangs import STEP, STOPPED, WITHIN, assert_verdict
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import (
    KILLED_IN,
    PHASES,
    environment,
    hold,
    largest_difference,
    lines,
    of_ranks,
    places,
    rank_for,
    write_job,
)

PATIENCE = {"publish_seconds": 0.5, "min_seconds": 6.0, "factor": 2.0, "first_seconds": 240.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "reuse"),
    [
        pytest.param(KILLED_IN, False, id="chosen"),
        pytest.param(PHASES, False, id="all", marks=pytest.mark.exhaustive),
        pytest.param(PHASES, True, id="all-reuse", marks=pytest.mark.exhaustive),
    ],
)
def test_a_kill_costs_what_came_after_the_last_checkpoint(
    lab: Lab, unbroken: Path, tmp_path: Path, phases: tuple[str, ...], reuse: bool
) -> None:
    """`kill -9` of some rank in phases of a step; what is drawn again is bit for bit the same, and the metrics with it.
    --exhaustive has all phases; tests/slurm/test_slices.py stops a run in those that are not here."""
    lab = environment(lab, tmp_path)
    lab = Lab(lab.folder, lab.env | {"HPCRL_MAX_RESTARTS": "0"})
    script = write_job(tmp_path, trainer={"reuse_rollouts": reuse})
    ranks = random.Random(2026)
    for place in places(tmp_path, phases):
        job = lab.sbatch([*of_ranks(2), script, "killed"], cwd=tmp_path)
        os.kill(hold(lab, job, place, rank_for(place, ranks.randrange(2), ranks=2)), signal.SIGKILL)
        assert lab.wait(job) == "FAILED", place.name
    job = lab.sbatch([*of_ranks(2), script, "killed"], cwd=tmp_path)
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert (tmp_path / "job.out").read_text().count("resuming after step") == len(phases) - 1  # in step 1 none
    killed, whole = lines(tmp_path / "runs" / "killed"), lines(unbroken)
    if reuse:
        assert largest_difference(killed, whole) < 1e-4
    else:
        assert killed == whole


def test_a_rank_that_is_stopped_is_named_and_the_job_ends(lab: Lab, tmp_path: Path) -> None:
    lab = environment(lab, tmp_path)
    job = lab.sbatch([write_job(tmp_path, run={"watchdog": PATIENCE}), "stopped"], cwd=tmp_path)
    rank, run = 3, tmp_path / "runs" / "stopped"
    pid = hold(lab, job, tmp_path / "hold" / f"{STEP}.update_actor", rank)

    def is_told() -> bool:
        record = read_heartbeat(run / "heartbeat", rank)
        return record is not None and (record.step, record.phase) == (STEP, "update_actor")

    lab.until(is_told, "known to be in its phase", job)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert lab.wait(job) == "FAILED"
    assert time.monotonic() - begin < WITHIN
    assert lab.exit_code(job) == 86
    verdict = assert_verdict(run, rank, "update_actor", STOPPED, node="n1")
    assert "--exclude=n1" in verdict
