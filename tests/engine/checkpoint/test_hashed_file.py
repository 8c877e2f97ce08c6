"""A file of a checkpoint that is not whole is never taken for one; torch writes through a failing disk to its end."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from hpcrl.engine.checkpoint.manifest import HashedFile, write_file

TENSOR = torch.arange(50_000, dtype=torch.float32)
WHOLE = 100_000  # bytes that the failing disks take


def write_tensors(file: HashedFile) -> None:
    for part in (TENSOR, TENSOR + 1):
        torch.save(part, file)


def nothing() -> None:
    pass


class Disk(io.FileIO):
    """The edge of the program: the operating system's answers, of which quota and lies cannot be had in a test."""

    def write(self, data) -> int:
        room = WHOLE - self.tell()
        if room >= len(data):
            return super().write(data)
        return self.full(data, room)

    def full(self, data, room: int) -> int:
        raise NotImplementedError


class OverQuota(Disk):
    """As Linux does it: first a short write, then an error."""

    def full(self, data, room: int) -> int:
        if room:
            return super(Disk, self).write(data[:room])
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


class TakesNothing(Disk):
    def full(self, data, room: int) -> int:
        return super(Disk, self).write(data[:room])


class Lies(Disk):
    """It says that all is written."""

    def full(self, data, room: int) -> int:
        super(Disk, self).write(data[:room])
        return len(data)


class HalfAtATime(io.FileIO):
    """What is allowed: every write is short."""

    def write(self, data) -> int:
        return super().write(data[: max(1, len(data) // 2)])


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    def mount(disk: type[io.FileIO]) -> None:
        opened = lambda path, mode, buffering, opener: disk(path, mode, opener=opener)  # noqa: E731
        monkeypatch.setattr("hpcrl.engine.checkpoint.manifest.open", opened, raising=False)

    return mount


def test_what_is_written_is_what_is_hashed_and_torch_reads_it(tmp_path: Path, on: Callable) -> None:
    for name, disk in (("plain", io.FileIO), ("short", HalfAtATime)):
        on(disk)
        entry = write_file(tmp_path / name, write_tensors, None, nothing)
        data = (tmp_path / name).read_bytes()
        assert (entry.path, entry.bytes, entry.xxh3_128) == (name, len(data), xxhash.xxh3_128_hexdigest(data))
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "short").read_bytes()
    first = io.BytesIO(data[: len(data) // 2])
    assert torch.equal(torch.load(first, weights_only=True), TENSOR)


@pytest.mark.parametrize(("disk", "code"), [(OverQuota, errno.EDQUOT), (TakesNothing, errno.EIO), (Lies, errno.EIO)])
def test_a_disk_that_takes_less_is_an_error_that_names_the_file(tmp_path: Path, on: Callable, disk, code) -> None:
    on(disk)
    with pytest.raises(OSError) as caught:
        write_file(tmp_path / "part", write_tensors, None, nothing)
    assert caught.value.errno == code and caught.value.filename == str(tmp_path / "part")
    assert caught.value.strerror


def test_a_quota_that_shows_only_in_the_flush_is_an_error(tmp_path: Path, monkeypatch) -> None:
    def over_quota(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", over_quota)
    with pytest.raises(OSError) as caught:
        write_file(tmp_path / "part", write_tensors, None, nothing)
    assert caught.value.errno == errno.EDQUOT and caught.value.filename == str(tmp_path / "part")


def test_a_file_size_limit_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (WHOLE, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_file(tmp_path / "part", write_tensors, None, nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG


def target(root: Path, step: int) -> Path:
    path = root / f"step_{step:08d}.tmp" / "actor" / "__0_0.distcp"
    path.parent.mkdir(parents=True)
    return path


def test_by_way_of_scratch_the_file_is_the_same_and_nothing_is_left_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "node"))
    straight, moved = target(tmp_path / "a", 1), target(tmp_path / "b", 1)
    freed = []
    expected = write_file(straight, write_tensors, None, nothing)
    assert write_file(moved, write_tensors, "$NODE_DISK/hpcrl", lambda: freed.append(moved.exists())) == expected
    assert moved.read_bytes() == straight.read_bytes()
    assert freed == [False]  # the copy in memory went before the flush
    assert list((tmp_path / "node" / "hpcrl").iterdir()) == []


def test_what_a_killed_attempt_left_in_scratch_is_replaced(tmp_path: Path, monkeypatch) -> None:
    scratch = tmp_path / "node"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        write_file(target(tmp_path / "run", 1), write_tensors, str(scratch), nothing)
    assert len(list(scratch.iterdir())) == 1
    other = target(tmp_path / "run", 3).with_name("__0_0.distcp_more")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        write_file(other, write_tensors, str(scratch), nothing)
    (left_of_another_file,) = scratch.glob("*more*")
    write_file(target(tmp_path / "run", 2), write_tensors, str(scratch), nothing)
    assert list(scratch.iterdir()) == [left_of_another_file]


def test_scratch_files_have_names_that_others_cannot_make_first(tmp_path: Path, monkeypatch) -> None:
    scratch, names = tmp_path / "node", list[str]()

    def write(file: HashedFile) -> None:
        names.append(file.path.name)
        write_tensors(file)

    for step in (1, 2):
        write_file(target(tmp_path / "run", step), write, str(scratch), nothing)
    assert len(set(names)) == 2 and len({name.rpartition(".")[0] for name in names}) == 1


def test_a_scratch_file_that_another_user_exchanges_fails_the_save(tmp_path: Path) -> None:
    scratch, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"other")
    others = [os.mkfifo, lambda path: path.symlink_to(elsewhere), lambda path: path.write_bytes(b"other")]
    for step, make in enumerate(others):

        def exchange(make: Callable[[Path], object] = make) -> None:
            (file,) = scratch.iterdir()
            file.unlink()
            make(file)

        with pytest.raises(OSError):
            write_file(target(tmp_path / "run", step), write_tensors, str(scratch), exchange)


def test_scratch_that_cannot_be_used_costs_a_line(tmp_path: Path, on: Callable, caplog) -> None:
    (tmp_path / "file").write_text("")
    path = target(tmp_path / "run", 1)
    entry = write_file(path, write_tensors, str(tmp_path / "file"), nothing)
    assert entry.bytes == path.stat().st_size
    assert "trainer.checkpoint.scratch_dir" in caplog.text and "directly to the checkpoint" in caplog.text
