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

from hpcrl.runtime.rank_status import read_heartbeat
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.run.test_ends import TP2
from tests.runtime.conftest import MPIEXEC, start  # noqa: F401  # fixture
from tests.runtime.test_ends import left_of

HANGING_JOB = Path(__file__).parents[1] / "runtime" / "hanging_job.py"
STEP = 2  # in which it hangs
ROLES = {"update_actor": "actor", "generate": "rollout"}
PATIENCE = {"publish_seconds": 0.5, "min_seconds": 6.0, "factor": 2.0, "first_seconds": 240.0}
WITHIN = 5 * 12.0  # five times what was measured from the hang to the end
STOPPED = "not even its watchdog runs"


def wait_for_hang(process: psutil.Popen, run: Path, rank: int, phase: str) -> None:
    """Until the rank says that it is in the phase in which it hangs."""
    give_up = time.monotonic() + 180
    while True:
        record = read_heartbeat(run / "heartbeat", rank)
        if record is not None and (record.step, record.phase) == (STEP, phase):
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, f"rank {rank} does not get to {phase} of step {STEP}: {record}"
        time.sleep(0.05)


def assert_verdict(run: Path, rank: int, phase: str, why: str = "", node: str | None = None) -> str:
    """exit.json and verdict.md of a run blame that rank, on this node or on `node`; gives the verdict."""
    role = ROLES[phase]
    sentence = f"rank {rank} on {node or os.uname().nodename} is in {phase} ({role}), no progress for "
    told = json.loads((run / "exit.json").read_text())
    assert (told["code"], told["rank"], told["role"], told["phase"]) == (86, rank, role, phase)
    assert told["error"].startswith(sentence) and why in told["error"]
    verdict = (run / "verdict.md").read_text()
    assert verdict.startswith(f"# Hang: {sentence}") and f"Step {STEP}." in verdict
    return verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "phase", "how", "why"),
    [
        pytest.param(2, 0, "update_actor", "stop", STOPPED, marks=pytest.mark.exhaustive),  # tests/slurm has one
        pytest.param(4, 3, "update_actor", "stop", STOPPED, marks=pytest.mark.exhaustive),
        (4, 2, "update_actor", "lock", STOPPED),
        pytest.param(4, 3, "update_actor", "spin", "the other 3 wait in update_actor", marks=pytest.mark.exhaustive),
        (4, 3, "generate", "spin", "the other 3 wait in "),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_job_ends(
    start: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    ranks: int,
    rank: int,
    phase: str,
    how: str,
    why: str,
) -> None:
    run = tmp_path / "runs" / "ends"
    section = {"name": "ends", "dir": str(tmp_path / "runs"), "watchdog": PATIENCE}
    config = write_config(tmp_path, placement=TP2, run=section)
    hang = f"{rank} {STEP} {phase} {how}"
    python = (sys.executable,) if how == "stop" else RANK  # preloaded ranks are not mpiexec's family
    process = start(MPIEXEC, "-n", str(ranks), *python, HANGING_JOB, "train", config, HANG=hang)
    wait_for_hang(process, run, rank, phase)
    begin, family = time.monotonic(), psutil.Process(process.pid).children(recursive=True)

    _, stderr = process.communicate(timeout=WITHIN)
    print(f"ended {time.monotonic() - begin:.1f} s after the hang began, exit code {process.returncode}")
    assert process.returncode != 0  # launchers make of 86 what they like; exit.json has it
    assert left_of(family, 10) == []
    verdict = assert_verdict(run, rank, phase, why)
    assert stderr.count("hpcrl: hang: ") == 1
    assert ("stuck_here" in verdict) == (how != "stop"), "the stacks of the rank, where it can give them"
    ticks = [record.ticks for record in (read_heartbeat(run / "heartbeat", other) for other in range(ranks)) if record]
    if phase == "generate":
        assert ticks[rank] == 2, "tokens"
    else:
        assert ticks[rank] == 0
        assert max(ticks) == 1, "half of the others, or the only one, are in their first micro-batch"
