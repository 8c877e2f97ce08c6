"""A rank that hangs in the middle of training: the job ends by itself, and says which rank it was."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.launch.heartbeat import read
from tests.launch.conftest import MPIEXEC, start  # noqa: F401  # fixture
from tests.launch.test_ends import left_of
from tests.trainer.test_ends import TP2, write_config

HANGING_JOB = Path(__file__).parents[1] / "launch" / "hanging_job.py"
PATIENCE = {"publish_seconds": 0.5, "min_seconds": 6.0, "factor": 2.0, "first_seconds": 240.0}
WITHIN = 5 * 12.0  # five times what was measured from the hang to the end


def wait_for_hang(process: psutil.Popen, run: Path, rank: int, step: int) -> None:
    """Until the rank says that it is in the phase in which it hangs."""
    give_up = time.monotonic() + 180
    while True:
        record = read(run / "heartbeat", rank)
        if record is not None and (record.step, record.phase) == (step, "update_actor"):
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, f"rank {rank} does not get to step {step}: {record}"
        time.sleep(0.05)


def assert_verdict(run: Path, rank: int, step: int, why: str = "", node: str | None = None) -> str:
    """exit.json and verdict.md of a run blame that rank, on this node or on `node`; gives the verdict."""
    sentence = f"rank {rank} on {node or os.uname().nodename} is in update_actor (actor), silent for "
    told = json.loads((run / "exit.json").read_text())
    assert {name: told[name] for name in ("code", "rank", "role", "phase")} == {
        "code": 86,
        "rank": rank,
        "role": "actor",
        "phase": "update_actor",
    }
    assert told["error"].startswith(sentence) and why in told["error"]
    verdict = (run / "verdict.md").read_text()
    assert verdict.startswith(f"# Hang: {sentence}") and f"Step {step}." in verdict
    return verdict


@pytest.mark.parametrize(
    ("rank", "how", "why"),
    [
        (0, "stop", "not even its watchdog runs"),
        pytest.param(3, "stop", "not even its watchdog runs", marks=pytest.mark.slow),
        (3, "spin", "the other 3 wait in update_actor"),
        pytest.param(2, "lock", "not even its watchdog runs", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_job_ends(
    start: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    rank: int,
    how: str,
    why: str,
) -> None:
    run = tmp_path / "runs" / "ends"
    section = {"name": "ends", "dir": str(tmp_path / "runs"), "watchdog": PATIENCE}
    config = write_config(tmp_path, placement=TP2, run=section)
    process = start(MPIEXEC, "-n", "4", sys.executable, HANGING_JOB, "train", config, HANG=f"{rank} 2 {how}")
    wait_for_hang(process, run, rank, step=2)
    begin, family = time.monotonic(), psutil.Process(process.pid).children(recursive=True)

    _, stderr = process.communicate(timeout=WITHIN)
    print(f"ended {time.monotonic() - begin:.1f} s after the hang began, exit code {process.returncode}")
    assert process.returncode != 0  # launchers make of 86 what they like; exit.json has it
    assert left_of(family, 10) == []
    verdict = assert_verdict(run, rank, 2, why)
    records = [read(run / "heartbeat", other) for other in range(4)]
    assert [record.ticks for record in records if record][rank] == 0
    assert max(record.ticks for record in records if record) == 1, "half of the others are in their first micro-batch"
    assert stderr.count("hpcrl: hang: ") == 1
    assert ("stuck_here" in verdict) == (how != "stop"), "the stacks of the rank, where it can give them"
