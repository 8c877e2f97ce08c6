"""How a job on three ranks ends: by agreement, by one rank's error, by `kill -9`, by Ctrl-C."""

from __future__ import annotations

import json
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.processes import alive


def exit_json(folder: Path) -> dict[str, object]:
    return json.loads((folder / "runs" / "small" / "exit.json").read_text())


@pytest.mark.parametrize(("mode", "code"), [("ok", 0), ("requeue", 85)])
def test_planned_ends_have_the_code_of_main(run_job: Callable, tmp_path: Path, mode: str, code: int) -> None:
    ended = run_job(3, mode)
    assert (ended.code, ended.stderr) == (code, "")
    assert exit_json(tmp_path)["code"] == code
    assert stat.S_IMODE((tmp_path / "runs" / "small").stat().st_mode) == 0o700


def test_the_code_survives_ranks_that_leave_one_after_another(run: Callable, tmp_path: Path) -> None:
    """mpiexec kills the ranks that are still leaving when one goes without taking leave, and then returns 9."""
    script = tmp_path / "leave.py"
    script.write_text(
        "import time\n"
        "from hpcrl.runtime import world\n"
        "comm = world.start_mpi()\n"
        "shut, rank = world.flush, comm.rank\n"
        "def flush_slowly(): time.sleep(0.2 * rank); shut()\n"
        "world.flush = flush_slowly\n"
        "world.finish(85)\n"
    )
    ended = run(Path(sys.executable).with_name("mpiexec"), "-n", "3", sys.executable, script)
    assert (ended.code, ended.stderr) == (85, "")


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("load_refuses", "hpcrl: error: x.yaml: no such file"),
        ("refuse_together", "hpcrl: error: train.parquet has no rows"),
        ("refuse_on_rank_0", "hpcrl: error: train.parquet has no rows"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run_job: Callable, mode: str, line: str) -> None:
    ended = run_job(3, mode)
    assert (ended.code, ended.stderr) == (2, line + "\n")


def test_a_gpu_that_cannot_be_used_is_bad_input_on_all_ranks(run_job: Callable, tmp_path: Path) -> None:
    ended = run_job(2, "unusable_gpu")
    assert ended.code == exit_json(tmp_path)["code"] == 2
    assert ended.stderr.count("\n") == 1 and "this node has 1 GPU, but torch can use none" in ended.stderr


def test_a_run_directory_that_cannot_be_made_is_bad_input(run_job: Callable, tmp_path: Path) -> None:
    (tmp_path / "small_job.file").touch()
    ended = run_job(2, "no_run_directory")
    assert ended.code == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("hpcrl: error: cannot make the run directory") and "run.dir" in ended.stderr


def test_an_error_on_one_rank_ends_all_and_tells_where(run_job: Callable, tmp_path: Path) -> None:
    ended = run_job(3, "raise")
    assert ended.code == 1 and ended.seconds < 30
    first, *rest = ended.stderr.splitlines()
    assert first == "hpcrl: rank 1 failed (role actor, phase update_actor): ValueError: boom"
    assert rest[0] == "Traceback (most recent call last):" and any("break_down" in line for line in rest)
    assert exit_json(tmp_path) == {
        "code": 1,
        "rank": 1,
        "role": "actor",
        "phase": "update_actor",
        "error": "ValueError: boom",
    }
    assert "boom" in (tmp_path / "runs" / "small" / "logs" / "rank_00001.log").read_text()


def test_an_error_on_all_ranks_is_told_once(run_job: Callable) -> None:
    ended = run_job(3, "raise_everywhere")
    assert ended.code == 1
    assert ended.stderr.count("ValueError: boom") == 2, "the banner, and the traceback's last line"


def test_a_broken_loader_is_no_users_error(run_job: Callable) -> None:
    ended = run_job(2, "load_breaks")
    assert ended.code == 1 and "rank 0 failed" in ended.stderr and "Traceback" in ended.stderr


def test_a_rank_that_leaves_silently_ends_all(run_job: Callable) -> None:
    assert run_job(3, "exit").seconds < 30


def family_when_ready(process: psutil.Popen, folder: Path) -> list[psutil.Process]:
    """Every descendant of mpiexec, once all three ranks have two children that loop forever."""
    give_up = time.monotonic() + 60
    while len(list(folder.glob("ready.*"))) < 3:
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    # the proxy; per rank itself, its fork server, its resource tracker, and two children with their supervisors
    assert len(family) == 1 + 3 * 7
    return family


def left_of(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Who is still there after at most `seconds`."""
    give_up = time.monotonic() + seconds
    while True:
        left = alive(family)
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_kill_9_of_a_rank_ends_the_job_and_leaves_no_process(start: Callable, tmp_path: Path, rank: int) -> None:
    process = start_children(start)
    family = family_when_ready(process, tmp_path)
    begin = time.monotonic()
    psutil.Process(int((tmp_path / f"ready.{rank}").read_text())).kill()
    assert process.wait(timeout=10) != 0
    assert left_of(family, 10 - (time.monotonic() - begin)) == []


@pytest.mark.slow
def test_kill_9_of_mpiexec_leaves_no_process(start: Callable, tmp_path: Path) -> None:
    process = start_children(start)
    family = family_when_ready(process, tmp_path)
    process.kill()
    assert left_of(family, 10) == []


def test_ctrl_c_is_one_line_and_code_130(start: Callable, tmp_path: Path) -> None:
    process = start_children(start)
    family = family_when_ready(process, tmp_path)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=10)[1]
    assert process.returncode == 130 and stderr.endswith("hpcrl: interrupted\n") and "Traceback" not in stderr
    assert left_of(family, 5) == []


def start_children(start: Callable) -> psutil.Popen:
    mpiexec, small_job = Path(sys.executable).with_name("mpiexec"), Path(__file__).with_name("small_job.py")
    return start(mpiexec, "-n", "3", sys.executable, small_job, "children")
