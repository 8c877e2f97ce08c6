"""A save holds what was there when it began, is shared out over the ranks, and starts no process."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
import torch

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.checkpoint.sharded_save import ShardedSave
from hpcrl.engine.engine import TrainEngine
from tests.covering import slow_but
from tests.mpi.lab import Lab, own_layout
from tests.mpi.layouts import (
    SHAPE,
    SOME_LAYOUTS,
    begin_save,
    finish_save,
    make_batch,
    part_of,
    policy_loss,
)

pytestmark = pytest.mark.ci_world(2)

ADAM = OptimConfig(lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("layout", slow_but("tp2", SOME_LAYOUTS))
def test_training_goes_on_beside_a_save(groups, world_tmp_path, layout) -> None:
    batch = part_of(make_batch(), groups[layout])
    step = lambda engine: engine.train(batch, max_tokens=64, loss=policy_loss, entropy=True)  # noqa: E731
    engine = TrainEngine(SHAPE, groups[layout], optim=ADAM, total_steps=9, seed=3)
    memory: list[torch.Tensor] = []
    expected = []
    for turn in range(3):
        folder = world_tmp_path / f"{turn}"
        save = begin_save(engine, folder, groups[layout], memory)
        expected.append(step(engine))  # which changes every weight while the thread may still write
        finish_save(save, folder, groups[layout])
    expected.append(step(engine))
    for turn in range(3):
        again = TrainEngine(SHAPE, groups[layout], optim=ADAM, total_steps=9, seed=4)
        load_sharded(again, world_tmp_path / f"{turn}")
        assert [step(again) for _ in expected[turn:]] == expected[turn:]


class Watch:
    """Whatever would start a process from Python; hooks stay for ever, so it has a switch."""

    STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen")

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.seen is not None and event in self.STARTS:
            self.seen.append(event)


def test_no_process_is_started_by_a_save_and_all_ranks_write_as_much(lab: Lab, world, monkeypatch) -> None:
    watch, children = Watch(), []
    begin, work = ShardedSave.__init__, ShardedSave._work

    def begin_watched(save, *arguments, **options):
        watch.seen = watch.seen or []
        children.append({child.pid for child in psutil.Process().children(recursive=True)})
        begin(save, *arguments, **options)

    def work_watched(save, *arguments):
        work(save, *arguments)
        children.append({child.pid for child in psutil.Process().children(recursive=True)})

    with monkeypatch.context() as patch:
        patch.setattr(ShardedSave, "__init__", begin_watched)
        patch.setattr(ShardedSave, "_work", work_watched)
        run = lab.run("watched", own_layout(world.size), trainer={"save_freq": 1})
    seen, watch.seen = watch.seen, None
    assert len(children) == 2 * 2 * 2  # begin and finish, of two roles, in two steps
    assert seen == [] and all(each == children[0] for each in children)

    manifest = json.loads((run / "checkpoints" / "step_00000002" / "manifest.json").read_text())
    for role in ("actor", "critic"):
        sizes = [file["bytes"] for file in manifest["files"] if file["path"].startswith(f"{role}/__")]
        assert len(sizes) == world.size
        assert max(sizes) < 1.5 * min(sizes), role
