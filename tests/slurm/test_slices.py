"""A run in slices: stopped in every phase by signals and by its time limit, requeued by Slurm, resumed, and equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab
from tests.slurm.small_ppo import environment, lines, write_job

# A place in the job for each step from the second on: what stops it there, and on which rank it is held.
PHASES = (
    *("generate", "score", "compute_log_prob", "compute_values", "compute_advantage", "update_critic", "update_actor"),
    *("update_weights", "write", "generate.val", "begin_save"),
)
SIGNALS = ("URG", "USR1", "TERM")
OTHER_STEP = {"update_weights": "any", "begin_save": "any", "generate.val": "0"}  # what the command says of its step


@pytest.fixture(scope="module")
def unbroken(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job without an interruption; the folder of its run."""
    folder = tmp_path_factory.mktemp("unbroken")
    lab = environment(lab, folder)
    job = lab.sbatch([write_job(folder), "whole"], cwd=folder)
    assert lab.wait(job) == "COMPLETED", (folder / "job.out").read_text()
    return folder / "runs" / "whole"


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.exhaustive) for turn in (1, 2))])
def test_a_run_stopped_in_each_phase_equals_an_unbroken_one(
    lab: Lab, unbroken: Path, tmp_path: Path, turn: int
) -> None:
    """Each phase of a step with one of the signals; --exhaustive adds the other pairs."""
    lab = environment(lab, tmp_path)
    places = {}
    for index, phase in enumerate(PHASES):
        step = OTHER_STEP.get(phase, str(index + 1))
        places[tmp_path / "hold" / f"{step}.{phase}"] = (index % 4, SIGNALS[(index + turn) % len(SIGNALS)])
    job = lab.sbatch([write_job(tmp_path), "stopped"], cwd=tmp_path)
    for restart, (place, (rank, signal)) in enumerate(places.items()):
        place.write_text(str(rank))
        lab.until(lambda place=place: place.read_text().startswith("held"), f"at {place.name}", job)
        lab.run("scancel", f"--signal={signal}", job)
        lab.until(lambda restart=restart: lab.restarts(job) > restart, f"requeued after {place.name}", job)
    assert lab.wait(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    run = tmp_path / "runs" / "stopped"
    assert lines(run) == lines(unbroken)
    slices = [one["step"] for one in json.loads((run / "slices.json").read_text())]
    assert len(slices) == len(PHASES) + 1 and slices == sorted(slices)
