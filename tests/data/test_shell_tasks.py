"""`hpcrl data shell_tasks`: staged tasks run as they were; what may not be in one is a line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.data.row_file import RowFile
from hpcrl.rollout.environments.environment import Turn
from hpcrl.rollout.environments.shell_task import ShellTask
from hpcrl.sandbox.task_sandbox import probe_sandbox


def staged(folder: Path, *tasks: dict) -> subprocess.CompletedProcess[str]:
    lines = (json.dumps({"prompt": "Do it.", "test": "sh check.sh"} | task) + "\n" for task in tasks)
    (folder / "tasks.jsonl").write_text("".join(lines))
    options = ["--from", str(folder), "--out", str(folder / "out"), "--val-rows", "1"]
    command = [sys.executable, "-m", "hpcrl", "data", "shell_tasks", *options]
    return subprocess.run(command, capture_output=True, text=True)


def with_entry(folder: Path, name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
    with tarfile.open(folder / "task.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, target
        archive.addfile(entry, io.BytesIO())


def test_a_folder_and_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "tool").write_text("echo 42")
    (folder / "tool").chmod(0o755)
    (folder / "again").symlink_to("tool")
    with tarfile.open(tmp_path / "second.tar", "w") as archive:
        archive.add(folder, "sub")
    files = {"check.sh": "test $(cat answer) = 42"}
    ran = staged(
        tmp_path,
        {"task": "first", "test_files": files},
        {"prompt": "And this.", "task": "second.tar", "test_files": {"sub/check": "true"}},
        {"prompt": "Nothing.", "task": None},
    )
    assert ran.returncode == 0, ran.stderr
    rows = [row for split in ("train", "val") for row in RowFile(str(tmp_path / "out" / f"{split}.parquet"))]
    by_prompt = {row["prompt"][0]["content"]: row["extra_info"] for row in rows}
    first, second = Path(by_prompt["Do it."]["task"]), Path(by_prompt["And this."]["task"])
    assert os.access(first / "tool", os.X_OK) and os.readlink(first / "again") == "tool"
    assert (second / "sub" / "tool").read_text() == "echo 42"
    assert by_prompt["Nothing."].get("task") is None
    if why_not := probe_sandbox().why_not:
        pytest.skip(why_not)
    task = ShellTask()
    task.reset({"extra_info": by_prompt["Do it."]}, 0)
    task.bash("./again > answer")
    step = task.step(Turn("done"))
    task.close()
    assert step.reward == 1.0, step


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "up": (lambda folder: with_entry(folder, "../x"), "a path that leads out"),
    "device": (lambda folder: with_entry(folder, "null", tarfile.CHRTYPE), "a device"),
    "link": (lambda folder: with_entry(folder, "x", tarfile.SYMTYPE, "/etc/passwd"), "a link that leads out"),
    "text": (lambda folder: (folder / "task.tar.gz").write_text("no archive") and None, "not a whole tar archive"),
    "pipe": (
        lambda folder: (folder / "task.tar.gz").mkdir() or os.mkfifo(folder / "task.tar.gz" / "p"),
        "special file",
    ),
    "missing": (lambda folder: None, "is not in"),
    "outside": (lambda folder: (folder / "task.tar.gz").symlink_to("/etc"), "is not in"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_may_not_be_in_a_task(tmp_path: Path, name: str) -> None:
    make, expected = BAD[name]
    make(tmp_path)
    ran = staged(tmp_path, {"task": "task.tar.gz"}, {"task": None, "prompt": "x"})
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert expected in ran.stderr and "task.tar.gz" in ran.stderr
    assert not list((tmp_path / "out").rglob("*.parquet"))
