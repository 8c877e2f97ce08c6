"""Checkpoints of real runs, on disks and in processes that fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.engine.checkpoint.store import CheckpointStore
from tests.engine.checkpoint.damage import flipped, truncated
from tests.run.small_run import checkpoints, compared, lines, log_of, run_folder, train
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

# Rank 1 may write no file of more than 100,000 bytes during the saves of steps 2 and 4.
FULL_DISK = """
import functools
import resource

from hpcrl.workers.model_worker import ModelWorker

begin_save = ModelWorker.begin_save

@functools.wraps(begin_save)
def with_limit(self, folder, *options):
    if self.rank == 1:
        full = folder.endswith(("step_00000002.tmp", "step_00000004.tmp"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if full else -1, -1))
    return begin_save(self, folder, *options)

ModelWorker.begin_save = with_limit
"""

# Rank 1 is killed while its thread writes the checkpoint of step 3.
KILLED = """
import os
import signal

from hpcrl.engine.checkpoint.manifest import HashedFile

write = HashedFile.write

def die(self, data):
    if "step_00000003" in str(self.path) and self.path.name == "__1_0.distcp" and self.size > 50_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)

HashedFile.write = die
"""

# Rank 1's disk takes the checkpoint of step 4 in small pieces, for twice as long as the watchdog bears silence.
SLOW = """
import time

from hpcrl.engine.checkpoint.manifest import HashedFile

write, pieces = HashedFile.write, 20

def write_slowly(self, data):
    global pieces
    if "step_00000004" in str(self.path) and self.path.match("actor/__1_0.distcp") and pieces:
        pieces -= 1
        time.sleep(0.5)
    return write(self, data)

HashedFile.write = write_slowly
"""
PATIENCE = {"publish_seconds": 0.5, "min_seconds": 5.0, "factor": 1.0, "first_seconds": 240.0}

FILES = {
    "manifest.json",
    "trainer.json",
    *(
        f"{role}/{name}"
        for role in ("actor", "critic")
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json")
    ),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert train(folder, 2) == 0
    return folder


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_used(unbroken: Path, tmp_path: Path, damage) -> None:
    source = run_folder(unbroken) / "checkpoints"
    newest = source / "step_00000004"
    assert {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()} == FILES
    for step in (3, 4):
        shutil.copytree(source / f"step_{step:08d}", tmp_path / f"step_{step:08d}")
    store = CheckpointStore(tmp_path)
    for name in FILES:
        path = tmp_path / "step_00000004" / name
        whole = path.read_bytes()
        damage(path)
        told: list[str] = []
        found = store.newest_valid(told.append)
        assert found is not None and found[1] == tmp_path / "step_00000003"
        (line,) = told
        assert f"step_00000004: {name} " in line and line.endswith("using step_00000003 instead")
        path.write_bytes(whole)
    found = store.newest_valid(pytest.fail)
    assert found is not None and found[0] == 4


@pytest.mark.slow
def test_a_full_disk_costs_checkpoints_and_not_the_run(tmp_path: Path, unbroken: Path) -> None:
    code = train(tmp_path, 2, script=FULL_DISK)
    assert compared(tmp_path) == compared(unbroken)
    assert [line.get("perf/failed_saves") for line in lines(tmp_path)] == [None, None, 1.0, 1.0]
    assert checkpoints(tmp_path) == ["latest", "step_00000001", "step_00000003"]
    told = [
        line
        for line in log_of(tmp_path).splitlines()
        if "the checkpoint of step" in line and "could not be written" in line
    ]
    for step, newest, line in zip((2, 4), (1, 3), told, strict=True):
        assert f"the checkpoint of step {step} could not" in line and "rank 1 on " in line
        assert f"step_{step:08d}.tmp/actor/__1_0.distcp: File too large" in line
        assert f"training continues, step_{newest:08d} is still the newest checkpoint" in line
    # The last save is what the run was for.
    assert code == 1
    end = json.loads((run_folder(tmp_path) / "exit.json").read_text())
    assert end["code"] == 1 and end["phase"] == "save_checkpoint" and "could not be written" in end["error"]

    assert train(tmp_path, 2) == 0
    assert "resuming after step 3" in log_of(tmp_path)
    assert compared(tmp_path) == compared(unbroken)
    assert checkpoints(tmp_path) == ["latest", "step_00000001", "step_00000003", "step_00000004"]


def can_mount() -> bool:
    command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="mounting a file system in a namespace of one's own is not allowed here")
def test_a_full_file_system_costs_checkpoints_and_not_the_run(
    tmp_path: Path,
    unbroken: Path,
) -> None:
    """One checkpoint has room there, two have not; the next one has none either."""
    folder, kept = run_folder(tmp_path) / "checkpoints", tmp_path / "kept"
    folder.mkdir(parents=True)
    size = sum(path.stat().st_size for path in (run_folder(unbroken) / "checkpoints" / "step_00000004").rglob("*"))
    mount = f"mount -t tmpfs -o size={size * 3 // 2},mode=700 tmpfs {folder}"
    inside = f'{mount}; "$@"; code=$?; cp -r {folder} {kept}; exit $code'
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", inside, "sh")
    assert train(tmp_path, 2, before=before) == 1
    assert compared(tmp_path) == compared(unbroken)
    told = [
        line
        for line in log_of(tmp_path).splitlines()
        if "the checkpoint of step" in line and "could not be written" in line
    ]
    assert len(told) == 3 and all("No space left on device" in line for line in told)
    assert sorted(path.name for path in kept.iterdir()) == ["latest", "step_00000001"]
    found = CheckpointStore(kept).newest_valid(pytest.fail)
    assert found is not None and found[0] == 1


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path,
    unbroken: Path,
) -> None:
    assert train(tmp_path, 2, script=KILLED) != 0
    assert checkpoints(tmp_path) == ["latest", "step_00000001", "step_00000002", "step_00000003.tmp"]

    assert train(tmp_path, 2, trainer={"checkpoint": {"scratch_dir": str(tmp_path / "node")}}) == 0
    assert "resuming after step 2" in log_of(tmp_path)
    assert compared(tmp_path) == compared(unbroken)
    assert checkpoints(tmp_path) == ["latest", *(f"step_{step:08d}" for step in (2, 3, 4))]
    assert list((tmp_path / "node").iterdir()) == []


@pytest.mark.slow
def test_a_slow_save_for_which_all_wait_is_no_hang(tmp_path: Path) -> None:
    """No main thread gets on meanwhile: rank 0 waits for the last checkpoint, and rank 1 for rank 0."""
    section = {"name": "ends", "dir": str(tmp_path / "runs"), "watchdog": PATIENCE}
    assert train(tmp_path, 2, script=SLOW, run=section) == 0
    assert checkpoints(tmp_path)[-1] == "step_00000004"


@pytest.mark.slow
@pytest.mark.quiet
def test_an_asynchronous_save_blocks_the_loop_for_a_copy_or_a_quarter_of_a_synchronous_one(tmp_path: Path) -> None:
    """Both in one run, of a model of 160 MB. The least of five each, as other work on the machine only adds to them. A
    disk that is nearly as fast as memory writes the copy in less than four times the time that it takes to make it."""
    bench = [sys.executable, str(REPOSITORY / "tools" / "bench"), "checkpoint", "--json", "--layers", "3"]
    command = [str(MPIEXEC), "-n", "2", *bench, "--folder", str(tmp_path)]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    print(found)
    assert found["bytes"] > 100e6
    assert found["least_async_blocked"] < max(0.25 * found["least_sync_blocked"], 1.5 * found["least_memcpy"])
