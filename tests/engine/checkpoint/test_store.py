from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.engine.checkpoint.manifest import FileEntry, hash_file, write_manifest
from hpcrl.engine.checkpoint.store import CheckpointStore, Retention, load_path, read_trainer_state
from hpcrl.runtime.exits import InputError
from tests.engine.checkpoint.damage import flipped, truncated


def save(store: CheckpointStore, step: int, content: str = "") -> None:
    folder = store.begin(step)
    for role in ("actor", "critic"):
        (folder / role).mkdir()
        (folder / role / "__0_0.distcp").write_text(f"{role} {step} {content}" * 100)
    store.commit(step, {"epoch": step // 10, "consumed": 64 * step, "kl_coef": 0.1 + step, "content": content})


def quiet(line: str) -> None:
    pytest.fail(f"unexpected report: {line}")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_committed_checkpoint_comes_back(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest_valid(quiet) is None
    save(store, 10)
    save(store, 20)
    step, folder, state = store.newest_valid(quiet)
    assert (step, folder) == (20, store.folder(20))
    assert state == {"step": 20, "epoch": 2, "consumed": 1280, "kl_coef": 20.1, "content": ""}
    assert names(store.root) == ["latest", "step_00000010", "step_00000020"]
    assert (store.root / "latest").read_text() == "step_00000020\n"
    assert names(folder) == ["actor", "critic", "manifest.json", "trainer.json"]


def test_keep_counts_the_one_just_written(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=2))
    for step in (5, 10, 15, 20):
        save(store, step)
    assert names(tmp_path) == ["latest", "step_00000015", "step_00000020"]
    one = CheckpointStore(tmp_path, Retention(last=1))
    save(one, 25)
    assert names(tmp_path) == ["latest", "step_00000025"]


def test_later_checkpoints_of_an_abandoned_future_do_not_push_out_the_new_one(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=1))
    save(CheckpointStore(tmp_path), 40)
    save(store, 10)
    save(store, 20)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000040"]


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
@pytest.mark.parametrize("name", ["manifest.json", "trainer.json", "actor/__0_0.distcp", "critic/__0_0.distcp"])
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path, name, damage):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    save(store, 20)
    damage(store.folder(20) / name)
    reports: list[str] = []
    step, folder, state = store.newest_valid(reports.append)
    assert (step, folder, state["step"]) == (10, store.folder(10), 10)
    assert len(reports) == 1 and "\n" not in reports[0]
    assert "step_00000020" in reports[0] and name in reports[0] and "using step_00000010 instead" in reports[0]


def test_when_none_is_whole_it_says_so(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        save(store, step)
        truncated(store.folder(step) / "actor" / "__0_0.distcp")
    reports: list[str] = []
    assert store.newest_valid(reports.append) is None
    assert len(reports) == 2 and all("no other checkpoint is complete" in line for line in reports)


def test_latest_is_not_trusted(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    save(store, 20)
    for content in ("step_00000010", "step_00000099", "\x00garbage"):
        (tmp_path / "latest").write_text(content)
        assert store.newest_valid(quiet)[0] == 20
    (tmp_path / "latest").unlink()
    assert store.newest_valid(quiet)[0] == 20


def test_leftovers_are_ignored_and_swept(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (store.begin(30) / "half").write_text("x")
    (tmp_path / "step_notes").mkdir()
    (tmp_path / "step_00000050").write_text("a file")
    assert store.newest_valid(quiet)[0] == 10
    assert list(store.begin(30).iterdir()) == []
    save(store, 20)
    assert not store.pending(30).exists()


def test_a_step_can_be_saved_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10, "first")
    truncated(store.folder(10) / "actor" / "__0_0.distcp")
    save(store, 10, "second")
    assert store.newest_valid(quiet)[2]["content"] == "second"
    assert names(tmp_path) == ["latest", "step_00000010"]


class Killed(BaseException):
    pass


class Stop:
    """Counts the operations on the file system that matter for order, and ends the n-th with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count = 0
        self.at = at
        self.error = error
        for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "write_text")):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, operation: Callable) -> Callable:
        def counted(*arguments, **options):
            self.count += 1
            if self.count == self.at:
                raise self.error
            return operation(*arguments, **options)

        return counted


def written_by_a_rank(pending: Path, content: str) -> list[FileEntry]:
    (pending / "actor").mkdir()
    (pending / "actor" / "__0_0.distcp").write_text(content)
    return [hash_file(pending / "actor" / "__0_0.distcp", "actor/__0_0.distcp")]


@pytest.mark.parametrize("new_step", [20, 10], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("keep", [1, 2, None])
def test_a_kill_between_any_two_operations_loses_nothing(tmp_path, monkeypatch, new_step, keep):
    for at in range(1, 200):
        root = tmp_path / str(at)
        store = CheckpointStore(root, Retention(last=keep))
        save(store, 5, "older")
        save(store, 10, "old")
        written = written_by_a_rank(store.begin(new_step), "new")
        with monkeypatch.context() as patch:
            kill = Stop(patch, at, Killed())
            try:
                store.commit(new_step, {"content": "new"}, written)
            except Killed:
                pass
        step, folder, state = store.newest_valid(quiet)
        assert (step, state["content"]) in ((10, "old"), (new_step, "new"))
        assert (folder / "actor" / "__0_0.distcp").exists()
        save(store, 30, "next")
        assert store.newest_valid(quiet)[0] == 30
        left = names(root)
        assert not [name for name in left if name.endswith(".tmp")]
        assert not [name for name in left if name.endswith(".replaced") and name.removesuffix(".replaced") in left]
        if kill.count < at:
            assert at > 10
            return
    pytest.fail("commit never ended")


@pytest.mark.parametrize("new_step", [20, 10], ids=["a new step", "the same step again"])
def test_a_full_disk_at_any_operation_leaves_the_one_before_or_a_whole_one(tmp_path, monkeypatch, caplog, new_step):
    for at in range(1, 200):
        store = CheckpointStore(tmp_path / str(at), Retention(last=1))
        save(store, 10, "old")
        written = written_by_a_rank(store.begin(new_step), "new")
        caplog.clear()
        with monkeypatch.context() as patch:
            full = Stop(patch, at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.root)))
            try:
                store.commit(new_step, {"content": "new"}, written)
                expected = (new_step, "new")
                assert full.count < at or "is saved, but" in caplog.text
            except OSError:
                expected = (10, "old")
                store.discard(new_step)
        step, _, state = store.newest_valid(quiet)
        assert (step, state["content"]) == expected
        assert store.newest() in (store.folder(step).name, store.folder(step).name + ".replaced")
        save(store, 30, "next")
        assert names(store.root) == ["latest", "step_00000030"]
        if full.count < at:
            return
    pytest.fail("commit never ended")


def test_the_best_by_a_metric_stay(tmp_path):
    """The values come from the files, so that a resumed run knows them."""
    rules = Retention(last=1, best=1, metric="val/score")
    for step, value in ((10, 0.5), (20, 0.9), (30, None), (40, 0.7)):
        store = CheckpointStore(tmp_path, rules)
        store.begin(step)
        store.commit(step, {}, metric=value)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000040"]
    other = CheckpointStore(tmp_path, Retention(last=1, best=1, metric="val/loss", larger_is_better=False))
    other.begin(50)
    other.commit(50, {}, metric=3.0)
    assert names(tmp_path) == ["latest", "step_00000050"]  # a value of another metric says nothing


def test_load_path_takes_a_run_a_checkpoints_folder_or_a_step(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    save(store, 20)
    assert load_path(tmp_path, quiet) == store.folder(20)
    assert load_path(store.root, quiet) == store.folder(20)
    assert load_path(str(store.folder(10)), quiet) == store.folder(10)
    copy = shutil.copytree(store.folder(10), tmp_path / "warm_start")
    assert load_path(copy, quiet) == copy


def test_load_path_without_a_checkpoint_is_one_line(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path in ("none", "empty", "file", "run/checkpoints/step_00000011"):
        with pytest.raises(InputError, match=path) as caught:
            load_path(tmp_path / path, quiet)
        assert "\n" not in str(caught.value)
    truncated(store.folder(10) / "actor" / "__0_0.distcp")
    with pytest.raises(InputError, match="__0_0.distcp"):
        load_path(store.folder(10), quiet)
    reports: list[str] = []
    with pytest.raises(InputError, match="no complete checkpoint"):
        load_path(tmp_path / "run", reports.append)
    assert len(reports) == 1


TYPES = ['{"roles": 3}', '{"init_from": []}', '{"kl_ctrl": null}', '{"under_way": {}}', '{"step": "1"}']


@pytest.mark.parametrize("content", ["[]", "", "3", "{", '{"step": ', "[" * 10**5, *TYPES])
def test_a_trainer_file_that_is_not_an_object_is_damage(tmp_path, content):
    (tmp_path / "trainer.json").write_text(content)
    write_manifest(tmp_path)
    with pytest.raises(InputError, match=r"trainer\.json"):
        read_trainer_state(tmp_path)


def test_state_that_json_cannot_hold_is_refused_before_anything_counts(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    for state in ({"kl": float("nan")}, {"object": object()}):
        store.begin(20)
        with pytest.raises((ValueError, TypeError)):
            store.commit(20, state)
    assert store.newest_valid(quiet)[0] == 10
