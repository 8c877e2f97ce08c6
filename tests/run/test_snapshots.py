"""Snapshots in memory of nodes: what a killed run continues from, on which nodes and ranks, and what is left over."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import stat
import textwrap
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.loader import load_config
from hpcrl.engine.checkpoint.manifest import hash_file
from hpcrl.engine.checkpoint.store import CheckpointStore
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.memory.state import snapshot_bytes
from hpcrl.run import recovery
from hpcrl.run.recovery import RECORD, Record, recover
from hpcrl.runtime import node_memory
from hpcrl.runtime.node_memory import LOCK, NodeMemory, check_folder, folder_in, next_ranks
from tests.run.small_run import TP2, checkpoints, compared, lines, log_of, run_folder, train

KILLED = 3  # step that a kill cuts short, the last one
# Each rank is on a node of its own choice; rank 0 is killed in a step, and the launcher kills the others.
RANK = """
import os
import signal

os.environ["SLURMD_NODENAME"] = {nodes!r}.split()[int(os.environ["PMI_RANK"])]
os.environ.pop("SLURM_JOB_ID", None)

from hpcrl.run.run import Run

begin_update = Run.begin_update

def die(self):
    if self.metrics["training/global_step"] == {killed}:
        self.snapshots.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    begin_update(self)

Run.begin_update = die
"""


def start(folder: Path, nodes: str, *, killed: int = 0, ranks: int = 2, **sections: Any) -> int:
    """Train with a snapshot after every step and no checkpoint before the end; gives the exit code."""
    memory = {"snapshot_dir": f"{folder}/$SLURMD_NODENAME"}
    trainer = {"save_freq": -1, "snapshot_freq": 1, "checkpoint": memory, "total_training_steps": KILLED}
    script = textwrap.dedent(RANK).format(nodes=nodes, killed=killed)
    return train(folder, ranks, script=script, trainer={**trainer, **sections.pop("trainer", {})}, **sections)


def memory_of(folder: Path, node: str) -> Path:
    (found,) = (folder / node).glob(f"hpcrl_{os.geteuid()}_*")
    return found


class Killed:
    """A run of two ranks on the nodes a and b that was killed in its last step, and can be had again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._copy = folder / "lab", folder / "copy"
        assert start(folder / "whole", "a b") == 0
        self.whole = compared(folder / "whole")
        assert list((folder / "whole" / "a").iterdir()) == []  # a planned end leaves nothing
        assert start(self.folder, "a b", killed=KILLED) != 0
        shutil.copytree(self.folder, self._copy, symlinks=True)

    def again(self) -> Path:
        shutil.rmtree(self.folder)
        shutil.copytree(self._copy, self.folder, symlinks=True)
        return self.folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
def test_the_loss_of_a_node_costs_less_than_a_step(killed: Killed) -> None:
    folder = killed.again()
    for node in "ab":
        assert stat.S_IMODE(memory_of(folder, node).stat().st_mode) == 0o700
    planned = snapshot_bytes(TrainingPlan(load_config(str(folder / "job.yaml"))).models, ["a", "b"])
    for node, nbytes in planned.items():
        files = list(memory_of(folder, node).glob("*/*/*.distcp"))
        assert len(files) == 2 * 2 * 2  # of two roles and two ranks, twice
        # torch.save adds 1 KiB to a tensor, which is much for the small ones of this model
        assert nbytes <= sum(path.stat().st_size for path in files) <= 2 * nbytes, node
    shutil.rmtree(folder / "b")

    assert start(folder, "a c") == 0
    assert f"recovered step {KILLED - 1} from memory of the nodes" in log_of(folder)
    assert compared(folder) == killed.whole
    assert all("perf/snapshot_seconds" in line for line in lines(folder)[1 : KILLED - 1])
    assert [list((folder / node).iterdir()) for node in "ac"] == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("nodes", "ranks", "gone"),
    [
        pytest.param("b a", 2, "", id="ranks on other nodes"),
        pytest.param("b c", 2, "a", id="without the node of rank 0's record"),
        pytest.param("b", 1, "a", id="one rank"),
        pytest.param("c d", 2, "", id="other nodes"),
    ],
)
def test_files_are_found_on_the_nodes_of_the_next_start(killed: Killed, nodes: str, ranks: int, gone: str) -> None:
    folder = killed.again()
    if gone:
        shutil.rmtree(folder / gone)
    recovers = set(nodes.split()) >= {"a"}
    assert start(folder, nodes, ranks=ranks) == 0
    assert (f"recovered step {KILLED - 1}" in log_of(folder)) == recovers
    assert f"resuming after step {KILLED - 1}" in log_of(folder) or not recovers
    if ranks == 2:
        assert compared(folder) == killed.whole
    assert lines(folder)[-1]["step"] == KILLED


@pytest.mark.exhaustive
def test_four_ranks_continue_as_two(tmp_path: Path) -> None:
    assert start(tmp_path, "a a b b", ranks=4, killed=KILLED, placement=TP2) != 0
    shutil.rmtree(tmp_path / "b")
    assert start(tmp_path, "a a", ranks=2, placement=TP2) == 0
    assert "resuming after step 2" in log_of(tmp_path) and checkpoints(tmp_path)[1] == "step_00000002"
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["one_step_off", "bounded_staleness"])
def test_samples_that_wait_for_training_are_in_a_snapshot(tmp_path: Path, mode: str) -> None:
    pools = {"pools": {"train": "1", "gen": "2"}, "rollout": {"pool": "gen"}}
    placement = pools | {role: {"pool": "train"} for role in ("actor", "critic", "ref")}
    options: dict[str, Any] = {"ranks": 3, "placement": placement, "async_training": {"mode": mode}}
    assert start(tmp_path, "a b c", killed=KILLED, **options) != 0
    shutil.rmtree(tmp_path / "c")
    assert start(tmp_path, "a b d", **options) == 0
    assert "resuming after step 2" in log_of(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert not (run_folder(tmp_path) / "snapshot.tmp").exists()


@pytest.mark.exhaustive
def test_no_room_for_snapshots_is_one_line(tmp_path: Path) -> None:
    script = "import shutil\nreal = shutil.disk_usage\nshutil.disk_usage = lambda path: real(path)._replace(free=9)\n"
    trainer = {"save_freq": -1, "snapshot_freq": 1, "checkpoint": {"snapshot_dir": str(tmp_path / "node")}}
    assert train(tmp_path, 1, script=script, trainer=trainer) == 0
    (line,) = [line for line in log_of(tmp_path).splitlines() if "no snapshots: " in line]
    assert "they need 1.20 MB in" in line and "where 9 B are free" in line


class OneRank:
    rank, size, local_size = 0, 1, 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, Path]:
    """A config, and a folder with a snapshot of step 5 by the run's first job; this is the second one."""
    monkeypatch.setattr(recovery.run_owner, "number", lambda: 2)
    options = ["trainer.snapshot_freq=1", f"trainer.checkpoint.snapshot_dir={tmp_path}/node"]
    config = load_config(None, [f"run.dir={tmp_path}", "run.name=r", *options])
    folder = recovery.memory_folder(config)
    for generation in "01":
        (folder / generation / "actor").mkdir(parents=True)
        (folder / generation / "actor" / "__0_0.distcp").write_bytes(b"weights" * 99)
    folder.chmod(0o700)
    files = [hash_file(folder / "1" / "actor" / "__0_0.distcp", "actor/__0_0.distcp")]
    record = Record(5, 1, 1, {"roles": ["actor"]}, None, files)
    (folder / RECORD).write_text(json.dumps(asdict(record)))
    return config, folder


def steps(config: Any) -> list[int]:
    return [step for step, _ in CheckpointStore(Path(config.run.dir) / "r" / "checkpoints").listed()]


def test_a_snapshot_becomes_a_checkpoint(recorded: Any) -> None:
    config, folder = recorded
    (folder / "0" / "actor" / "__0_0.distcp").write_bytes(b"torn")  # of the snapshot that was in progress
    recover(OneRank(), config)
    found = CheckpointStore(Path(config.run.dir) / "r" / "checkpoints").newest_valid(pytest.fail)
    assert found is not None and found[0] == 5 and found[2] == {"roles": ["actor"], "step": 5}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"wEights" * 99), Path.unlink])
def test_a_damaged_snapshot_is_not_used(recorded: Any, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    config, folder = recorded
    damage(folder / "1" / "actor" / "__0_0.distcp")
    recover(OneRank(), config)
    (line,) = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
    assert "step 5" in line and "no node has actor/__0_0.distcp" in line and "no checkpoint" in line
    assert steps(config) == []


@pytest.mark.parametrize("change", [{"owner": 2}, {"files": [{"path": "../x", "bytes": 1, "xxh3_128": ""}]}])
def test_a_snapshot_of_another_run_is_not_used(recorded: Any, change: dict[str, Any]) -> None:
    """A run whose folder was removed begins anew, and its jobs are counted anew."""
    config, folder = recorded
    (folder / RECORD).write_text(json.dumps(json.loads((folder / RECORD).read_text()) | change))
    recover(OneRank(), config)
    assert steps(config) == []


def test_copies_go_to_the_next_node_in_the_ring() -> None:
    assert next_ranks("aa") == [None, None]
    assert next_ranks("aabbcc") == [2, 3, 4, 5, 0, 1]
    assert next_ranks("abab") == [1, 0, 3, 2]
    assert next_ranks("aaab") == [3, 3, 3, 0]  # one node has more ranks than the next


def test_a_copy_that_fails_is_reported_and_the_next_one_works(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    threading.Thread(target=node_memory._serve, args=(theirs, tmp_path / "next"), daemon=True).start()
    memory = NodeMemory(tmp_path, [], {}, ours, None)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "0").write_text("in the way of a folder")
    for name, content in {"0/a": b"x", "1/b": b"weights" * 200_000, "1/c": b""}.items():
        path = tmp_path / name.partition("/")[2]
        path.write_bytes(content)
        with open(path, "rb") as file:
            if name == "0/a":
                with pytest.raises(OSError, match="next/0/a on"):
                    memory.copy(name, file.fileno(), content)
                continue
            assert memory.copy(name, file.fileno(), content) == hash_file(path, name).xxh3_128
        assert (tmp_path / "next" / name).read_bytes() == content
    ours.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], NodeMemory | str]:
    """`NodeMemory.open` of a job of one rank, without MPI in the process of pytest."""
    monkeypatch.setattr(node_memory, "all_gather_object", lambda comm, value: [value])
    return lambda folder: NodeMemory.open(SimpleNamespace(rank=0, size=1), folder, one_host=True)  # type: ignore[arg-type]


def test_folders_of_ended_jobs_are_removed(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folders = {name: folder_in(str(tmp_path), Path("/runs") / name) for name in ("own", "ended", "restarts", "runs")}
    for name, job in {"runs": "5", "restarts": "6"}.items():
        monkeypatch.setenv("SLURM_JOB_ID", job)
        memory = opened(folders[name])
        assert isinstance(memory, NodeMemory) and memory.lock is not None
        if name == "restarts":
            os.close(memory.lock)  # the process was killed
    folders["ended"].mkdir(0o700)
    (folders["ended"] / LOCK).write_text("5")
    own = opened(folders["own"])
    assert sorted(tmp_path.iterdir()) == sorted(folders[name] for name in ("own", "restarts", "runs"))
    assert caplog.messages == [f"removed {folders['ended']} on {node_memory.node_name()}: snapshots of an ended job"]
    assert isinstance(own, NodeMemory)
    own.close()
    assert not folders["own"].exists()


def test_a_folder_that_another_user_can_change_is_not_used(tmp_path: Path, opened: Any) -> None:
    folder, elsewhere = folder_in(str(tmp_path / "memory"), Path("/runs/a")), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    assert "is not a folder of this user only" in str(opened(folder))
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(OSError, match="not a folder of this user only"):
        check_folder(folder)
    assert elsewhere.exists()
