"""Jobs that lose a rank or a node, and go on inside their allocation."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcrl.observe.read.recorded_run import read_recorded_run
from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import environment, hold, lines, of_ranks, write_job

WATCHED = {"watchdog": {"publish_seconds": 0.5}}


@pytest.mark.slow
def test_a_killed_rank_and_a_lost_node_cost_no_slice(losing_lab: Lab, unbroken: Path, tmp_path: Path) -> None:
    """On two of three nodes: a rank is killed, then a node is lost, which the third one replaces. The metrics are those
    of an undisturbed run, bit for bit."""
    lab = environment(losing_lab, tmp_path)
    lab = Lab(lab.folder, lab.env | {"HPCRL_SPARE_NODES": "1"})
    job = lab.sbatch(["--no-kill", *of_ranks(2), "--nodes=3", write_job(tmp_path, run=WATCHED), "lost"], cwd=tmp_path)
    os.kill(hold(lab, job, tmp_path / "hold" / "3.update_actor", 1), signal.SIGKILL)
    hold(lab, job, tmp_path / "hold" / "6.compute_log_prob", 1)
    lab.lose("n1")
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert lab.restarts(job) == 0
    assert lines(tmp_path / "runs" / "lost") == lines(unbroken)
    output = (tmp_path / "job.out").read_text()
    assert (
        "hpcrl: a rank was killed in step 3 (srun's exit code 137); start 1 of at most 10 again, on 2 node(s)" in output
    )
    assert "hpcrl: lost n1 in step 6; start 2 of at most 10 again, on 2 node(s), 0 spare" in output
    story = read_recorded_run(tmp_path / "runs" / "lost").attempts
    assert [(one.relaunch, one.resumed_at, one.job) for one in story] == [(0, None, job), (1, 2, job), (2, 5, job)]
    assert story[1].reason == "lost n1 in step 6"


@pytest.mark.exhaustive
def test_without_a_spare_node_the_job_goes_on_with_fewer_replicas(losing_lab: Lab, tmp_path: Path) -> None:
    """Three nodes are too few for TP2 x DP2 but two are not."""
    lab = environment(losing_lab, tmp_path)
    job = lab.sbatch(
        ["--no-kill", "--nodes=4", "--ntasks-per-node=1", write_job(tmp_path, run=WATCHED), "fewer"], cwd=tmp_path
    )
    hold(lab, job, tmp_path / "hold" / "4.generate", 2)
    lab.lose("n2")
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert lab.restarts(job) == 0
    assert "lost n2 in step 4; start 1 of at most 10 again, on 2 node(s), 1 spare" in (tmp_path / "job.out").read_text()
    assert [line["step"] for line in lines(tmp_path / "runs" / "fewer")] == list(range(13))


@pytest.mark.exhaustive
def test_the_loss_of_the_first_node_requeues(losing_lab: Lab, unbroken: Path, tmp_path: Path) -> None:
    lab = environment(losing_lab, tmp_path)
    job = lab.sbatch(["--no-kill", *of_ranks(2), write_job(tmp_path, run=WATCHED), "first"], cwd=tmp_path)
    hold(lab, job, tmp_path / "hold" / "4.update_actor", 1)
    lab.lose("n0")
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert lab.restarts(job) == 1
    assert lines(tmp_path / "runs" / "first") == lines(unbroken)


@pytest.mark.exhaustive
def test_a_crash_that_repeats_ends_the_slice(losing_lab: Lab, tmp_path: Path) -> None:
    lab = environment(losing_lab, tmp_path)
    lab = Lab(lab.folder, lab.env | {"HPCRL_MAX_RESTARTS": "0"})
    job = lab.sbatch(["--no-kill", *of_ranks(2), write_job(tmp_path, run=WATCHED), "crash"], cwd=tmp_path)
    for _ in range(2):
        os.kill(hold(lab, job, tmp_path / "hold" / "3.update_actor", 1), signal.SIGKILL)
    assert lab.wait(job) == "FAILED"
    output = (tmp_path / "job.out").read_text()
    assert "a rank was killed in step 3 (srun's exit code 137), as before the last start" in output


@pytest.mark.exhaustive
def test_after_a_hang_the_ranks_start_again(losing_lab: Lab, tmp_path: Path) -> None:
    lab = environment(losing_lab, tmp_path)
    patience = {"watchdog": {"publish_seconds": 0.5, "min_seconds": 6.0, "factor": 2.0, "first_seconds": 240.0}}
    job = lab.sbatch(["--no-kill", *of_ranks(4), write_job(tmp_path, run=patience), "hang"], cwd=tmp_path)
    os.kill(hold(lab, job, tmp_path / "hold" / "3.update_actor", 3), signal.SIGSTOP)
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert lab.restarts(job) == 0
    assert "hpcrl: a hang in step 3; start 1 of at most 10 again, on 2 node(s)" in (tmp_path / "job.out").read_text()
