"""Archives of tasks: what is in them is unpacked as it is, and what should not be in them is an error that names it."""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.sandbox.foreign_files import ForeignFileError
from hpcrl.sandbox.task_archive import Most, unpack
from tests.sandbox.test_program import REPOSITORY

Entry = tuple[str, bytes | str, int]  # name, contents or target of a link, type


def archive_of(folder: Path, *entries: Entry, mode: str = "w", change: Callable = lambda info: None) -> Path:
    path = folder / "task.tar"
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for name, contents, kind in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o6755
            if isinstance(contents, str):
                info.linkname = contents
            else:
                info.size = len(contents)
            change(info)
            file.addfile(info, io.BytesIO(contents) if isinstance(contents, bytes) else None)
    return path


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_folders_and_links_that_stay_inside(tmp_path: Path, mode: str) -> None:
    data = random.Random(0).randbytes(3 << 20)
    archive = archive_of(
        tmp_path,
        ("./", b"", FOLDER),
        ("src/a b/große.bin", data, FILE),
        ("src/up", "../src/a b", LINK),
        ("src/hard", "./src/a b/große.bin", HARD),
        ("n" * 200, b"long", FILE),
        ("twice", b"first", FILE),
        ("twice", b"last", FILE),
        mode=mode,
    )
    unpack(archive, tmp_path / "task")
    assert (tmp_path / "task/src/up/große.bin").read_bytes() == (tmp_path / "task/src/hard").read_bytes() == data
    assert (tmp_path / "task/twice").read_bytes() == b"last" and (tmp_path / "task" / ("n" * 200)).exists()
    assert stat.S_IMODE((tmp_path / "task/src/hard").stat().st_mode) == 0o755
    with pytest.raises(FileExistsError):
        unpack(archive, tmp_path / "task")


BAD = {
    "..": [("a/../../b", b"x", FILE)],
    "absolute": [("/etc/b", b"x", FILE)],
    "a link up": [("d/b", "../../etc", LINK)],
    "a link to /": [("b", "/etc", LINK)],
    "a link behind a folder": [("d", b"", FOLDER), ("b", "d/../../etc", LINK)],
    "through a link": [("d", b"", FOLDER), ("l", "d", LINK), ("l/b", b"x", FILE)],
    "a link that a longer one uses": [("d/d", b"", FOLDER), ("l", "d/d", LINK), ("l/b", "../../x", LINK)],
    "a hard link out": [("b", "../../etc/passwd", HARD)],
    "a hard link to a link": [("d/l", "../x", LINK), ("b", "d/l", HARD)],
    "a hard link to nothing": [("b", "no", HARD)],
    "a device": [("b", b"", tarfile.CHRTYPE)],
    "a pipe": [("b", b"", tarfile.FIFOTYPE)],
    "over a folder": [("b/c", b"x", FILE), ("b", b"x", FILE)],
    "deep": [("d/" * 200 + "b", b"x", FILE)],
    "large": [("a", bytes(2 << 20), FILE), ("b", bytes(2 << 20), FILE)],
    "many": [*((f"f{number}", b"", FILE) for number in range(10)), ("b", b"", FILE)],
}


@pytest.mark.parametrize("name", BAD)
def test_other_entries_are_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(ForeignFileError) as found:
        unpack(archive_of(tmp_path, *BAD[name]), tmp_path / "in" / "task", Most(megabytes=3, files=10))
    last = BAD[name][-1][0]
    assert f"task.tar: {last[:100]}" in str(found.value) and "expected" in str(found.value)
    assert len(str(found.value).splitlines()) == 1
    assert not list((tmp_path / "in").iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_a_name_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(ForeignFileError) as found:
        unpack(archive_of(tmp_path, ("../\x1b[2J\nfake", b"", FILE)), tmp_path / "task")
    assert "\x1b" not in str(found.value) and "\n" not in str(found.value)


def test_a_small_archive_takes_no_memory_for_a_large_header(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 200 << 20
    with gzip.open(tmp_path / "task.tar", "wb", compresslevel=1) as file:
        file.write(info.tobuf())
        for _ in range(200):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(ForeignFileError, match="header of more"):
        unpack(tmp_path / "task.tar", tmp_path / "task")
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_damaged_archives_are_an_error(tmp_path: Path) -> None:
    whole = archive_of(tmp_path, ("a", random.Random(0).randbytes(40_000), FILE), mode="w:gz").read_bytes()
    for number, part in enumerate((whole[:-9000], whole[:60], b"", b"no archive" * 100, whole[:99] + b"\0" * 90_000)):
        (tmp_path / f"{number}.tar").write_bytes(part)
        with pytest.raises(ForeignFileError, match="not a whole tar archive"):
            unpack(tmp_path / f"{number}.tar", tmp_path / "task")
    assert not (tmp_path / "task").exists()


KILLED = "import os, signal; from pathlib import Path; from hpcrl.sandbox import task_archive as it\n"
KILLED += "it.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL); it.unpack(Path('task.tar'), Path('task'))"


def test_the_next_unpacking_removes_what_a_killed_one_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = archive_of(tmp_path, ("d/a", b"1", FILE))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment)
    assert killed.returncode == -signal.SIGKILL and (tmp_path / ".task.unpacking" / "d").exists()
    lock = os.open(tmp_path / ".task.unpacking", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):  # as long as another process is at it
        unpack(archive, tmp_path / "task")
    os.close(lock)
    unpack(archive, tmp_path / "task")
    assert ".task.unpacking: removed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task", "task.tar"]
