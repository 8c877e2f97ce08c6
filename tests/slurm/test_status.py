"""`hpcrl status` of several runs, from the files that runs write, and a squeue that prints what Slurm's does."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrl.runtime import run_owner
from hpcrl.slurm.request import Link, write_chain

ROOT = Path(__file__).parents[2]
LOG = "2026-03-01 12:{minute:02d}:00,123 {level} {name}: {text}\n"


def write_run(folder: Path, steps: int, *, total: int = 100, rising: float = 0.01, **files: Any) -> Path:
    """files: <name>.json -> its contents."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {}\n")
    rows = [{"step": step, "critic/score/mean": rising * step, "timing_s/step": 3.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in {"times": {"total_steps": total}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_log(run: Path, *lines: tuple[str, str, str]) -> None:
    text = (LOG.format(minute=minute, level=a, name=b, text=c) for minute, (a, b, c) in enumerate(lines))
    (run / "logs" / "rank_00000.log").write_text("".join(text))


@pytest.fixture
def status(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`status(folder, ..., squeue="echo ...")`: the command, in tmp_path."""

    def status(*arguments: str | Path, squeue: str = "exit 1", code: int = 0) -> subprocess.CompletedProcess[str]:
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
        (programs / "squeue").chmod(0o700)
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "hpcrl", "status", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done

    return status


def table(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Name of a run -> the other columns."""
    header, *lines = done.stdout.split("\n\n")[0].splitlines()
    starts = [name.start() for name in re.finditer(r"last warning|\S+", header)]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    return {name: rest for name, *rest in cells}


def test_a_line_for_each_run_of_a_folder(status: Callable[..., Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    slices = [{"job": "40", "restart": 0, "step": -1}, {"job": "41", "restart": 1, "step": 3, "ends_at": 0.0}]
    on = write_run(runs / "a_on", 20, slices=slices)
    write_log(on, ("WARNING", "hpcrl.run", "first"), ("WARNING", "hpcrl.x", "second"), ("WARNING", "torch", "third"))
    write_run(runs / "b_done", 100, rising=-0.001, exit={"code": 0})
    write_run(runs / "c_bad", 1, exit={"code": 1, "error": "ValueError: boom"})
    write_run(runs / "d_saved", 5, exit={"code": 85})
    write_run(runs / "e_killed", 5)
    waiting = runs / "f_waiting"
    waiting.mkdir()
    write_chain([Link("train", 2, 4, "43", (str(waiting),), str(waiting))])
    (runs / "no_run").mkdir()
    (runs / "file").touch()
    squeue = "echo '41|RUNNING|None|n[0-1]|2026-01-01T00:00:00|41|1:02:03'; echo '43|PENDING|Priority||N/A|43|1:00:00'"
    done = status(runs, squeue=squeue)
    assert table(done) == {
        "a_on": ["running", "20/100", "4m00s", "0.2", "+0.09", "2", "1:02:03", "12:01 second"],
        "b_done": ["done", "100/100", "-", "-0.1", "-0.009", "-", "-", "-"],
        "c_bad": ["failed", "1/100", "-", "0.01", "-", "-", "-", "(exit code 1: ValueError: boom)"],
        "d_saved": ["stopped", "5/100", "-", "0.05", "+0.04", "-", "-", "-"],
        "e_killed": ["stopped", "5/100", "-", "0.05", "+0.04", "-", "-", "-"],
        "f_waiting": ["queued", "-", "-", "-", "-", "-", "-", "-"],
    }
    assert done.stdout.endswith("\n\n1 running, 1 done, 1 failed, 2 stopped, 1 queued\n")
    assert status(squeue=squeue).stdout == done.stdout, "the default is runs/"
    assert table(status(on, runs / "b_done", on, squeue=squeue)).keys() == {"a_on", "b_done"}


def test_of_one_run_the_chain_is_shown(status: Callable[..., Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 20, slices=[{"job": "41", "restart": 0, "step": -1}])
    squeue = "echo '7_3|RUNNING|None|n1|2026-01-01T00:00:00|41|59:00'"  # an array's element, by its own id
    lines = status(run, squeue=squeue).stdout.splitlines()
    assert lines[0].split() == ["job", "run", "nodes", "Slurm", "job", "slice", "step", "ETA", "state"]
    assert lines[1].split() == ["run", "a", "-", "41", "1", "20/100", "4m00s", "running", "on", "n1"]


def test_a_chain_of_others_does_not_show_runs_that_are_not_in_it(status: Callable[..., Any], tmp_path: Path) -> None:
    private = write_run(tmp_path / "private", 7, exit={"code": 1, "error": "of the private run"})
    run = write_run(tmp_path / "runs" / "a", 20)
    links = [Link("train", 1, 1, job, (str(folder),), str(folder)) for job, folder in (("41", run), ("42", private))]
    (run / "chain.json").write_text(json.dumps({"links": [asdict(link) for link in links]}))
    shown = status(run).stdout
    assert "of the private run" not in shown and "1 of the chain's runs left out: their chain.json differs" in shown
    write_chain(links)
    assert "of the private run" in status(run).stdout
    for wrong in ({"job": 41}, {"runs": [1]}, {"runs": ["\0"]}, {"folder": None}):
        (run / "chain.json").write_text(json.dumps({"links": [asdict(links[0]) | wrong]}))
        assert "20/100" in status(run).stdout


def test_a_file_of_zeros_has_no_rows(status: Callable[..., Any], tmp_path: Path) -> None:
    """It was read to its end, which may be terabytes away."""
    run = write_run(tmp_path / "runs" / "a", 0)
    with open(run / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 42)
    assert "0/100" in status(run).stdout


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_a_run_outside_slurm_runs_while_its_owner_does(
    status: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Its process decides on this host, and its heartbeats elsewhere; clocks and times of files do not."""
    run = write_run(tmp_path / "runs" / "a", 20)
    with monkeypatch.context() as context:
        if host:
            context.setenv("SLURMD_NODENAME", host)
        run_owner.take(run, 0.2)
        assert table(status(run.parent, squeue="exit 127"))["a"][0] == "running"
    run_owner.let_go()  # as if killed: no heartbeat follows
    if not host:
        record = run / "owner" / "00000001.json"
        record.write_text(record.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    assert table(status(run.parent, squeue="exit 127"))["a"][0] == "stopped"


@pytest.mark.parametrize(
    ("rows", "reward", "trend"),
    [
        ([{"train/loss": 4.0 - step} for step in range(3)], "loss 2", "-2"),
        ([{"rewards/accuracies": 0.5}], "accuracy 0.5", "-"),
        ([{"critic/score/mean": value} for value in (1.0, None, 3.0)], "3", "+2"),
        ([{"critic/score/mean": value} for value in (9, *[1, 2] * 5)], "2", "+0.27"),  # of the last ten, not of 9
        ([{"actor/lr": 1.0}], "-", "-"),
    ],
)
def test_the_reward_of_other_jobs(
    status: Callable[..., Any], tmp_path: Path, rows: list[dict[str, Any]], reward: str, trend: str
) -> None:
    run = write_run(tmp_path / "runs" / "a", 0)
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "critic/sc']))
    assert table(status(run.parent))["a"][3:5] == [reward, trend]


def test_what_files_hold_never_reaches_a_terminal_raw(status: Callable[..., Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a\x1b[31m", 3, slices=["\x1b"], times=[])
    write_log(run, ("WARNING", "hpcrl.run", "\x1b]0;title\x07\x9b1m " + "long " * 100))
    (run / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": "\\u001b[5m"}\n[]\n\xff{}\n')
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hpcrl", "status", str(run.parent)]
    environ = os.environ | {"COLUMNS": "90", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environ, stdout=follower, check=True)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "\u241b]0;title" in shown and all(c.isprintable() for c in shown if c not in "\r\n")
    assert max(map(len, shown.splitlines())) == 90


def test_watch_repeats_until_it_is_interrupted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 20)
    command = [sys.executable, "-m", "hpcrl", "status", "--watch", "0.2"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(2)]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21}\n')
    write_run(tmp_path / "runs" / "b", 3)
    while "21/100" not in seen[-2] or not seen[-1].startswith("b "):
        seen.append(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(timeout=10) == 0


def test_only_the_end_of_a_long_run_is_read(status: Callable[..., Any], tmp_path: Path) -> None:
    """Of 50 runs of 1,000 steps with 120 metrics each."""
    run = write_run(tmp_path / "runs" / "r0", 0, total=1000)
    row = {f"metric/{number}": number / 7 for number in range(120)} | {"timing_s/step": 1.0}
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"step": step, **row, "critic/score/mean": step / 1000}) + "\n")
    for number in range(1, 50):
        copy = write_run(tmp_path / "runs" / f"r{number}", 0, total=1000)
        (copy / "metrics.jsonl").unlink()
        os.link(run / "metrics.jsonl", copy / "metrics.jsonl")
    found = table(status(run.parent))
    assert len(found) == 50 and all(line[1:5] == ["1000/1000", "-", "1", "+0.009"] for line in found.values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "status: no RUN is given and there is no folder runs here; name a run's folder"),
        (["nothing"], "nothing is no run's folder; expected <run.dir>/<run.name> of a run"),
        (["a", "nothing"], "nothing is no run's folder; expected <run.dir>/<run.name> of a run"),
        (["a", "--watch", "0"], "status: found --watch 0.0; expected seconds, at least 0.1"),
    ],
)
def test_wrong_command_lines(status: Callable[..., Any], tmp_path: Path, arguments: list[str], line: str) -> None:
    write_run(tmp_path / "a", 3)
    done = status(*arguments, code=2)
    assert done.stdout == "" and done.stderr.startswith(f"hpcrl: error: {line}") and done.stderr.count("\n") == 1
