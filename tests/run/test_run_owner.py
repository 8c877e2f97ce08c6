"""Two starts of one run: one owns its folder, and what it logs is what it would log by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.runtime import run_owner
from hpcrl.runtime.rank_status import read_heartbeat
from tests.preloaded import RANK
from tests.run.owner_races import race, write_job
from tests.run.small_run import write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, Ended, environment, run, start  # noqa: F401  # fixtures
from tests.slurm.small_ppo import lines

HELD_JOB = REPOSITORY / "tests" / "slurm" / "held_job.py"
Run, Start = Callable[..., Ended], Callable[..., "subprocess.Popen[str]"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those that a job that runs writes all the time."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    relative = {str(path.relative_to(folder)): path for path in files}
    return {
        name: path.read_bytes() for name, path in relative.items() if name.split("/")[0] not in ("heartbeat", "owner")
    }


def until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    give_up = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, what
        time.sleep(0.02)


class Job:
    """A job of two ranks whose rank 0 is held in its second step."""

    def __init__(self, folder: Path, start: Start) -> None:  # noqa: F811
        self.hold, self.run = folder / "hold", folder / "runs" / "a"
        self.hold.mkdir()
        settings = {"dir": str(folder / "runs"), "plugins": [str(HELD_JOB)], "owner_heartbeat_seconds": 0.5}
        trainer = {"total_training_steps": 3, "save_freq": 1}
        self.command = [
            MPIEXEC,
            "-n",
            "2",
            *RANK,
            "-m",
            "hpcrl",
            "train",
            write_config(folder, run=settings, trainer=trainer),
        ]
        self.environ = {"HOLD_FOLDER": str(self.hold)}
        self._start = start

    def begin_and_hold(self) -> subprocess.Popen[str]:
        place = self.hold / "2.update_actor"
        place.write_text("0")
        process = self._start(*self.command, "run.name=a", **self.environ)
        until(lambda: place.read_text().startswith("held"), process, "rank 0 does not get to its second update")
        until(self._has_saved, process, "the checkpoint of the first step is not committed")
        return process

    def _has_saved(self) -> bool:
        names = {path.name for path in (self.run / "checkpoints").iterdir()}
        return "latest" in names and not any(name.endswith(".tmp") for name in names)

    @property
    def owner(self) -> int:
        """Process id of the owner's rank 0."""
        found = run_owner.newest(self.run)
        assert found is not None and found.owner is not None
        return found.owner.pid


def test_a_second_start_is_rejected_and_one_after_a_kill_goes_on_at_once(
    start: Start,  # noqa: F811
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, start)
    assert run(*job.command, "run.name=whole", **job.environ).code == 0
    first = job.begin_and_hold()
    before = contents(job.run)
    second = run(*job.command, "run.name=a", **job.environ)
    assert (second.code, second.stdout) == (2, "")
    assert second.stderr.startswith(f"hpcrl: error: {job.run} is in use by hpcrl train on ")
    assert second.stderr.endswith(f"end that job first (kill {job.owner}), or choose another run.name\n")
    assert second.stderr.count("\n") == 1
    assert contents(job.run) == before
    os.kill(job.owner, signal.SIGKILL)
    third = run(*job.command, "run.name=a", **job.environ)
    assert third.code == 0 and "watching" not in third.stderr
    first.communicate(timeout=60)
    assert lines(job.run) == lines(tmp_path / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_a_job_that_was_stopped_loses_its_run_and_ends_with_one_line(
    start: Start,  # noqa: F811
    run: Run,  # noqa: F811
    tmp_path: Path,
    ranks: tuple[int, ...],
) -> None:
    """When it continues, or before, by a rank that was not stopped."""
    job = Job(tmp_path, start)
    assert run(*job.command, "run.name=whole", **job.environ).code == 0
    first = job.begin_and_hold()
    beats = [read_heartbeat(job.run / "heartbeat", rank) for rank in ranks]
    stopped = [beat.pid for beat in beats if beat is not None]
    assert stopped[0] == job.owner
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    second = run(*job.command, "run.name=a", SLURMD_NODENAME="elsewhere", **job.environ)
    assert second.code == 0 and second.stderr.count("watching its heartbeat for 1.5 s at most") == 1
    after = contents(job.run)
    assert lines(job.run) == lines(tmp_path / "runs" / "whole")
    (job.hold / "go").touch()
    for pid in stopped if len(stopped) == 2 else ():
        os.kill(pid, signal.SIGCONT)
    _, said = first.communicate(timeout=60)
    assert first.returncode in (2, 9)  # mpiexec returns that of one of the ranks, of which it has killed the others
    said = [line for line in said.splitlines() if line.startswith("hpcrl: ")]
    assert len(said) == 1 and f"{job.run} is now owned by hpcrl train on elsewhere" in said[0]
    assert contents(job.run) == after


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the small job without a race."""
    folder = tmp_path_factory.mktemp("whole")
    command = [MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", write_job(folder), "run.name=whole"]
    subprocess.run(command, cwd=folder, env=environment(OWNER_LOG=os.devnull), check=True, timeout=120)
    return lines(folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [n if n < 5 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(100)])
def test_two_starts_at_a_random_distance(
    start: Start,  # noqa: F811
    whole: list[dict[str, Any]],
    tmp_path: Path,
    number: int,
) -> None:
    config, log = write_job(tmp_path), str(tmp_path / "owner_log")

    def begin(_: int, name: str) -> subprocess.Popen[str]:
        return start(MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config, f"run.name={name}", OWNER_LOG=log)

    found = race(tmp_path, begin, whole, number)
    assert found["waited"] == 0.0, "this host knows whether a process runs"
    print(found)
