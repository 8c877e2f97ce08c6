"""The commands of `job.on_event`, of real jobs: stopped and continued, killed, failed, hanging."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.runtime.events import END_SECONDS
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.run.test_hangs import HANGING_JOB, PATIENCE, wait_for_hang
from tests.runtime.conftest import MPIEXEC, REPOSITORY, run, start  # noqa: F401  # fixtures

HELD_JOB = REPOSITORY / "tests" / "slurm" / "held_job.py"
NOTIFY = """#!/bin/sh
read -r line
echo "output of $HPCRL_EVENT"
test "$line" = "$HPCRL_EVENT_JSON" || exit 3
env | grep -q '^PMI_' && exit 4
printf '%s\\t%s\\t%s\\t%s\\n' "$HPCRL_EVENT" "$HPCRL_EVENT_RUN" "$HPCRL_EVENT_STEP" "$line" >>"$1"
"""
FAILING_JOB = Path(__file__).with_name("failing_update.py")


def write_job(folder: Path, *commands: str, **sections: Any) -> Path:
    """A job of three steps, with NOTIFY beside it."""
    (folder / "notify.sh").write_text(NOTIFY)
    (folder / "notify.sh").chmod(0o700)
    (folder / "hold").mkdir(exist_ok=True)
    run_section = {"name": "ends", "dir": str(folder / "runs"), **sections.pop("run", {})}
    job = {"on_event": list(commands) if commands else "./notify.sh events.tsv"}
    return write_config(folder, run=run_section, job=job, **sections)


def events(folder: Path) -> list[dict[str, Any]]:
    """What the command was given, in order."""
    found = []
    for line in (folder / "events.tsv").read_text().splitlines():
        *named, text = line.split("\t")
        given = json.loads(text)
        assert named == [given["event"], given["run"], str(given["step"])]
        assert given["run"] == "ends" and given["folder"] == str(folder / "runs" / "ends")
        found.append(given)
    return found


def names(folder: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in events(folder)]


def held_rank(process: Any, place: Path) -> int:
    """Process id of the rank that is held there."""
    give_up = time.monotonic() + 120
    while not place.read_text().startswith("held"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "no rank is held"
        time.sleep(0.05)
    return int(place.read_text().split(".")[1])


@pytest.mark.slow
def test_a_run_that_is_stopped_and_continued(start: Callable, run: Callable, tmp_path: Path) -> None:  # noqa: F811
    config = write_job(tmp_path, run={"plugins": [str(HELD_JOB)]}, trainer={"total_training_steps": 3, "save_freq": 1})
    place = tmp_path / "hold" / "2.update_actor"
    place.write_text("1")
    command = [MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config]
    process = start(*command, HOLD_FOLDER=str(tmp_path / "hold"), SLURM_JOB_ID="17")
    os.kill(held_rank(process, place), signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 85
    first = [("started", 0), ("saved", 1), ("saved", 2), ("left", 2)]
    assert names(tmp_path) == first
    left = events(tmp_path)[-1]
    assert left["code"] == 85 and left["reason"].startswith("SIGTERM on rank 1") and left["total_steps"] == 3
    assert left["message"].startswith("ends stopped after step 2 of 3, to be continued: SIGTERM on rank 1")
    assert left["job"] == "17"
    assert run(*command, HOLD_FOLDER=str(tmp_path / "hold")).code == 0
    assert names(tmp_path) == [*first, ("started", 2), ("saved", 3), ("done", 3)]
    found = events(tmp_path)
    assert [event["message"] for event in found[4:]] == [
        "ends continues after step 2 of 3",
        "ends has saved step 3 of 3",
        "ends is done: step 3 of 3",
    ]
    folder = tmp_path / "runs" / "ends"
    assert found[1]["checkpoint"] == str(folder / "checkpoints" / "step_00000001")
    log = (folder / "logs" / "events.log").read_text()
    assert log.count("output of saved\n") == 3 and "on_event" not in (folder / "logs" / "rank_00000.log").read_text()
    rows = [json.loads(line) for line in (folder / "logs" / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows if row["last"]] == ["left", "done"]
    assert all(row["problem"] is None for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed(start: Callable, tmp_path: Path, rank: int) -> None:  # noqa: F811
    config = write_job(tmp_path, run={"plugins": [str(HELD_JOB)]})
    place = tmp_path / "hold" / "2.update_actor"
    place.write_text(str(rank))
    command = [MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config]
    process = start(*command, HOLD_FOLDER=str(tmp_path / "hold"))
    os.kill(held_rank(process, place), signal.SIGKILL)
    process.communicate(timeout=60)
    give_up = time.monotonic() + 2 * END_SECONDS
    while len(names(tmp_path)) < 2:
        assert time.monotonic() < give_up, "no event of the end"
        time.sleep(0.05)
    assert names(tmp_path) == [("started", 0), ("failed", 1)]
    assert events(tmp_path)[1]["message"] == "ends failed after step 1 of 3: rank 0 was killed"


@pytest.mark.slow
def test_a_rank_that_raises(run: Callable, tmp_path: Path) -> None:  # noqa: F811
    """The command has run when the launcher ends, which may take the command with it."""
    config = write_job(tmp_path)
    ended = run(MPIEXEC, "-n", "2", *RANK, FAILING_JOB, "train", config)
    assert ended.code != 0
    assert names(tmp_path) == [("started", 0), ("failed", 1)]
    failed = events(tmp_path)[1]
    assert (failed["code"], failed["rank"], failed["role"], failed["phase"]) == (1, 1, "actor", "update_actor")
    assert failed["message"] == "ends failed after step 1 of 3: ValueError: boom"


@pytest.mark.slow
def test_a_hang(start: Callable, tmp_path: Path) -> None:  # noqa: F811
    placement = dict.fromkeys(("actor", "ref", "rollout"), {"tp": 2})
    config = write_job(tmp_path, run={"watchdog": PATIENCE}, placement=placement)
    options = {"HANG": "1 2 update_actor spin"}
    process = start(MPIEXEC, "-n", "2", *RANK, HANGING_JOB, "train", config, **options)
    wait_for_hang(process, tmp_path / "runs" / "ends", 1, "update_actor")
    process.communicate(timeout=60)
    assert names(tmp_path) == [("started", 0), ("hang", 1)]
    hang = events(tmp_path)[1]
    assert (hang["code"], hang["rank"], hang["phase"]) == (86, 1, "update_actor") and "no progress for" in hang["error"]


@pytest.mark.slow
def test_commands_that_fail_or_take_long_do_not_hold_up_the_run(run: Callable, tmp_path: Path) -> None:  # noqa: F811
    """They are one warning."""
    config = write_job(
        tmp_path, "./none.sh", "false", "sleep 1000", trainer={"total_training_steps": 3, "save_freq": 1}
    )
    ended = run(MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config)
    assert ended.code == 0
    folder = tmp_path / "runs" / "ends"
    log = (folder / "logs" / "rank_00000.log").read_text()
    lines = [line for line in log.splitlines() if "on_event" in line]
    assert len(lines) == 1 and "./none.sh on started, step 0: cannot be started: No such file" in lines[0]
    assert "WARNING" in lines[0]
    said = (folder / "logs" / "events.log").read_text()
    assert "false on started, step 0: exit code 1" in said and f"ended {END_SECONDS:.0f} s ago" in said
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1000"]]
    assert left == []
