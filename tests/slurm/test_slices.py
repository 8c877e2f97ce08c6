"""A run in slices: stopped in every phase by signals and by its time limit, requeued or submitted again, and equal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import PHASES, STOPPED_IN, environment, hold, lines, of_ranks, places, rank_for, write_job

SIGNALS = ("URG", "USR1", "TERM")
SLOW_SCORE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "turn"),
    [
        pytest.param(STOPPED_IN, 0, id="chosen"),
        *(pytest.param(PHASES, turn, id=f"all-{turn}", marks=pytest.mark.exhaustive) for turn in (0, 1, 2)),
    ],
)
def test_a_run_stopped_in_each_phase_equals_an_unbroken_one(
    lab: Lab, unbroken: Path, tmp_path: Path, phases: tuple[str, ...], turn: int
) -> None:
    """In phases of a step by one of the signals, which some rank or other gets in the middle of it, and at last by the
    time limit. After each second stop Slurm requeues the job, which takes it 8 seconds; after the others it is
    submitted again. --exhaustive adds the phases in which tests/slurm/test_kills.py kills a rank, the other pairs of
    phase and signal, and exchanges the two."""
    lab = environment(lab, tmp_path)
    script = write_job(tmp_path)

    def submit(requeues: int) -> str:
        once_more = Lab(lab.folder, lab.env | {"HPCRL_MAX_RESTARTS": str(requeues)})
        return once_more.sbatch([*of_ranks(2), script, "stopped"], cwd=tmp_path)

    job = submit(turn % 2)
    for number, place in enumerate([*places(tmp_path, phases), tmp_path / "hold" / "12.generate"]):
        hold(lab, job, place, rank_for(place, number, ranks=2))
        if number < len(phases):
            lab.run("scancel", f"--signal={SIGNALS[(number + turn) % 3]}", job)
        else:
            lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")  # less than the signal's lead: it comes
        if (number + turn) % 2 == 1:
            lab.until(lambda job=job: lab.restarts(job) == 1, f"requeued after {place.name}", job)
        else:
            assert (lab.wait(job), lab.exit_code(job)) == ("FAILED", 85), place.name
            job = submit(1)
    lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    run = tmp_path / "runs" / "stopped"
    assert lines(run) == lines(unbroken)
    found = [one["step"] for one in json.loads((run / "slices.json").read_text())]
    assert len(found) == len(phases) + 2 and found == sorted(found)


@pytest.mark.slow
def test_slices_end_before_their_allocation_does(lab: Lab, tmp_path: Path) -> None:
    """Of a minute, of which most is to stay free: a slice leaves in time, and the next one finds what it has saved. A
    reward that sleeps leaves the cores to others."""
    lab = environment(lab, tmp_path)
    (tmp_path / "score.py").write_text(SLOW_SCORE)
    reward = {"custom_reward_function": {"path": "score.py"}}
    script = write_job(
        tmp_path, reward=reward, trainer={"total_training_steps": 100_000, "walltime_margin": 40.0, "test_freq": -1}
    )
    job = lab.sbatch([*of_ranks(2), "--time=1", "--signal=URG@0", script, "timed"], cwd=tmp_path)
    lab.until(lambda: lab.restarts(job) == 1, "requeued", job)
    slices = tmp_path / "runs" / "timed" / "slices.json"
    lab.until(lambda: len(json.loads(slices.read_text())) == 2, "in its second slice", job)
    lab.run("scancel", job)
    said = (tmp_path / "job.out").read_text()
    assert "stopping: the allocation ends in " in said and "DUE TO TIME LIMIT" not in said
    times = json.loads(slices.with_name("times.json").read_text())
    assert min(times[name] for name in ("setup_s", "step_s", "save_s")) > 0
    assert all(a["step"] < b["step"] for a, b in itertools.pairwise(json.loads(slices.read_text())))
