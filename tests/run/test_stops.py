"""A signal to one rank, where generation goes on beside training."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import RANK
from tests.run.small_run import NOT_COMPARED, write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, run, start  # noqa: F401  # fixtures

HELD_JOB = REPOSITORY / "tests" / "slurm" / "held_job.py"
APART = {"pools": {"train": "1", "generate": "2"}, "rollout": {"pool": "generate"}}
APART |= dict.fromkeys(("actor", "ref"), {"pool": "train"})


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith((*NOT_COMPARED, "fully_async/"))}
        for line in text
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "bounded_staleness"])
def test_an_asynchronous_run_stops_between_two_steps_and_goes_on(
    start: Callable,  # noqa: F811
    run: Callable,  # noqa: F811
    tmp_path: Path,
    mode: str,
) -> None:
    """In one_step_off as if it had never stopped; what bounded_staleness trains on depends on time."""
    hold = tmp_path / "hold"
    hold.mkdir()
    config = write_config(
        tmp_path,
        run={"name": "stopped", "dir": str(tmp_path / "runs"), "plugins": [str(HELD_JOB)]},
        placement=APART,
        async_training={"mode": mode},
        trainer={"total_training_steps": 4},
    )
    command = [MPIEXEC, "-n", "3", *RANK, "-m", "hpcrl", "train", config]
    options = {"HOLD_FOLDER": str(hold)}
    if mode == "one_step_off":
        assert run(*command, "run.name=whole", **options).code == 0
    place = hold / "2.update_actor"
    place.write_text("1")
    process = start(*command, **options)
    give_up = time.monotonic() + 120
    while not place.read_text().startswith("held"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "rank 1 does not get to its second update"
        time.sleep(0.05)
    os.kill(int(place.read_text().split(".")[1]), signal.SIGURG)
    said = process.communicate(timeout=120)
    folder = tmp_path / "runs" / "stopped"
    assert process.returncode == 85 and json.loads((folder / "exit.json").read_text())["code"] == 85, said
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert run(*command, **options).code == 0
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]
    if mode == "one_step_off":
        assert lines(folder) == lines(tmp_path / "runs" / "whole")
