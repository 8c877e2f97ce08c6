"""Who owns a run's folder: what decides whether an owner lives, and starts that race, on one host and on several."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.runtime import run_owner
from hpcrl.runtime.run_owner import OwnedError, Owner, newest, runs, take
from hpcrl.sandbox.process_tree import process_runs

ROOT = Path(__file__).parents[2]

# Takes ./run again and again until ./end exists; two that are inside at a time write ./violation.
STARTER = """
import os, random, signal, sys, time
from pathlib import Path
from hpcrl.runtime import run_owner
from hpcrl.sandbox.process_tree import started_at

seconds, is_killed = float(sys.argv[1]), sys.argv[2] == "killed"
inside, draw = Path("inside"), random.Random(os.getpid())
waited = 0.0
while not Path("end").exists():
    try:
        run_owner.take(Path("run"), seconds)
    except run_owner.OwnedError:
        time.sleep(draw.random() * seconds / 4)
        continue
    finally:
        before, waited = waited, run_owner.seconds_waited()
        if waited - before > 5 * 3 * seconds:
            Path("violation").write_text(f"waited {waited - before} s")
    other = int(inside.read_text() or 0) if inside.exists() else 0
    if other and other != os.getpid() and started_at(other) not in (None, -1):
        Path("violation").write_text(f"{other} and {os.getpid()} are owners")
    inside.write_text(str(os.getpid()))
    with open("entered", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(draw.random() * seconds / 4)
    if is_killed and draw.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    run_owner.check()
    inside.write_text("")
    run_owner.let_go()()
"""
# Writes a line to ./run/lines every few milliseconds while it owns ./run.
WRITER = """
import time
from pathlib import Path
from hpcrl.runtime import run_owner

run_owner.take(Path("run"), 0.2)
while True:
    run_owner.check()
    with open("run/lines", "a") as file:
        file.write("line\\n")
    time.sleep(0.005)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    run_owner.let_go()


def python(script: str, *arguments: str, cwd: Path, host: str = "") -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | ({"SLURMD_NODENAME": host} if host else {})
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environ, stderr=subprocess.PIPE, text=True)


HERE = replace(Owner.here(), cluster="c", job="7", step="1", restart=1)
ELSEWHERE = replace(HERE, host="n2", job="8", restart=0)


@pytest.mark.parametrize(
    ("owner", "process", "slurm", "found"),
    [
        (replace(ELSEWHERE, released=True), None, False, False),
        (HERE, True, True, True),  # what this host says counts before what Slurm says
        (HERE, False, False, False),
        (HERE, None, False, None),  # a process that is hidden
        (ELSEWHERE, True, False, None),
        (ELSEWHERE, True, True, False),
        (replace(HERE, boot="before", job=""), False, True, None),  # the same name may be another machine
        (replace(HERE, pid_namespace="pid:[1]", job=""), False, True, None),  # a container, whose ids mean nothing here
        (replace(ELSEWHERE, job="7"), True, False, False),  # an earlier attempt of this job, which was requeued
        (replace(ELSEWHERE, job="7", restart=1), True, False, None),  # another step of this job
        (replace(ELSEWHERE, job="7", cluster="other"), True, False, None),  # another job, by chance of the same number
    ],
)
def test_what_decides_whether_an_owner_runs(
    owner: Owner, process: bool | None, slurm: bool, found: bool | None
) -> None:
    assert runs(owner, HERE, lambda pid, started: process, lambda owner: slurm) is found


def test_a_process_is_known_by_its_start_and_a_zombie_has_ended() -> None:
    own = Owner.here()
    assert process_runs(own.pid, own.started) is True
    assert process_runs(own.pid, own.started - 1) is False
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_runs(child.pid, own.started) is False
    child.wait()
    assert process_runs(child.pid, own.started) is False


@pytest.mark.parametrize(
    ("squeue", "step", "cluster", "ended"),
    [
        ("echo 7.1", "1", "c", False),
        ("true", "1", "c", True),  # so it answers for a step of a job that it has forgotten
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "", "c", True),
        ("echo socket timed out >&2; exit 1", "", "c", False),
        ("true", "1", "other", False),
    ],
)
def test_slurm_is_asked_about_its_own_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, step: str, cluster: str, ended: bool
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    run_owner._cluster.cache_clear()
    assert run_owner.slurm_ended(replace(HERE, step=step, cluster=cluster)) is ended
    run_owner._cluster.cache_clear()


def test_a_link_whose_answer_was_lost_counts_and_one_that_comes_too_late_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def loses_the_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    with monkeypatch.context() as context:
        context.setattr(os, "link", loses_the_answer)
        assert take(folder, 10.0) == 1
    run_owner.let_go()()
    assert take(folder, 10.0) == 2  # and removes 1
    assert not run_owner._link(folder, 1, Owner.here())
    assert not run_owner._link(folder, 2, Owner.here())
    assert sorted(os.listdir(folder / "owner")) == ["00000002.json"]


@pytest.mark.parametrize("block", [b"", b"{", b"[]", b'{"pid": "x"}'])
def test_a_damaged_record_is_watched_and_then_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], block: bytes
) -> None:
    monkeypatch.setattr(run_owner, "DEFAULT_SECONDS", 0.1)
    (folder / "owner").mkdir()
    (folder / "owner" / "00000007.json").write_bytes(block)
    assert take(folder, 0.1) == 8
    assert "was not released by a job whose record is damaged; watching" in capfd.readouterr().err


def test_the_line_names_the_owner_and_nothing_is_written(folder: Path) -> None:
    take(folder, 10.0)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    with pytest.raises(OwnedError, match=rf"in use by hpcrl.* on .*, pid {os.getpid()}, since .*end that job first"):
        take(folder, 10.0)
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before


@pytest.mark.parametrize(
    ("num_hosts", "seconds", "least"),
    [(1, 0.2, 40), pytest.param(3, 0.4, 10, marks=pytest.mark.slow)],
    ids=["one_host", "hosts"],
)
@pytest.mark.parametrize("end", ["released", "killed"])
def test_of_starts_that_race_one_is_the_owner(
    tmp_path: Path, num_hosts: int, seconds: float, least: int, end: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "entered").touch()

    def begin(number: int) -> subprocess.Popen[str]:
        return python(STARTER, str(seconds), end, cwd=tmp_path, host=f"n{number % num_hosts}")

    running = [begin(number) for number in range(5)]
    give_up = time.monotonic() + 60
    while len((tmp_path / "entered").read_text().splitlines()) < least and time.monotonic() < give_up:
        running = [begin(n) if process.poll() is not None else process for n, process in enumerate(running)]
        time.sleep(0.02)
    (tmp_path / "end").touch()
    for process in running:
        process.communicate()
    assert not (tmp_path / "violation").exists(), (tmp_path / "violation").read_text()
    assert len((tmp_path / "entered").read_text().splitlines()) >= least


def test_an_owner_that_was_stopped_ends_with_one_line_and_writes_nothing_more(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = python(WRITER, cwd=tmp_path, host="n1")
    give_up = time.monotonic() + 60
    while not (folder / "lines").exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    time.sleep(random.random() * 0.05)
    os.kill(writer.pid, signal.SIGSTOP)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert take(folder, 10.0) == 2
    written = (folder / "lines").read_bytes()
    os.kill(writer.pid, signal.SIGCONT)
    _, said = writer.communicate(timeout=30)
    assert writer.returncode == 2
    assert said.count("\n") == 1 and "run is now owned by hpcrl" in said and f"on n2, pid {os.getpid()}" in said
    after = (folder / "lines").read_bytes()
    assert len(after) - len(written) <= len("line\n"), "at most the write that was checked before the stop"
    found = newest(folder)
    assert found is not None and found.number == 2
