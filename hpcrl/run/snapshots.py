"""Snapshots of a run in memory of its nodes, every few steps.

A snapshot has the files of a checkpoint: on each node those of its ranks, and copies of those of the node before. The
record in rank 0's folder is written last. It names the newest complete snapshot with the hashes of its files, which are
overwritten only after the next snapshot is complete.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.controller.controller import Controller
from hpcrl.engine.checkpoint.manifest import FileEntry, SavedPart, error_line, files_below, hash_file
from hpcrl.forecast.memory.memory import size
from hpcrl.run.recovery import RECORD, Record
from hpcrl.run.saver import SaveError, wait_for_parts
from hpcrl.runtime import run_owner
from hpcrl.runtime.key_value_store import KeyValueStore
from hpcrl.runtime.node_memory import GENERATIONS, NodeMemory
from hpcrl.runtime.spans import spans
from hpcrl.sandbox.new_files import replace_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

log = logging.getLogger(__name__)

Plans = Mapping[int, "SavePlan | None"]  # by rank; None: as at the files' snapshot before
SHARED = "snapshot.tmp"  # in the run's folder


class Snapshots:
    """Takes snapshots. Lives on rank 0. At most one is in progress: a thread waits for the parts of all ranks."""

    def __init__(
        self, key_values: KeyValueStore, memory: NodeMemory | None, root: Path, needed: Mapping[str, int]
    ) -> None:
        """Set up the snapshots, if the memory has room for them.

        Args:
            memory: where snapshots are kept; None: there are none.
            root: the run's folder.
            needed: bytes by node.
        """
        self._key_values, self._root = key_values, root
        self._memory = memory if memory is not None and _has_room(memory, needed) else None
        self.step: int | None = None  # of the newest complete one
        self._under_way: tuple[int, Future[float]] | None = None
        self._num_begun = 0
        self._seconds: float | None = None
        self._described: dict[tuple[int, str], FileEntry] = {}  # by generation and role: its .metadata

    def begin(
        self,
        controller: Controller,
        step: int,
        roles: tuple[str, ...],
        metric: float | None,
        files: Callable[[Path], dict[str, Any]],
    ) -> None:
        """Begin a snapshot of these roles as they are after `step`. Training may continue when this returns.

        `files(folder)` writes further files and returns the contents of trainer.json, as for `Saver.begin`.
        """
        self.wait()
        if self._memory is None:
            return
        start, generation = time.perf_counter(), self._num_begun % GENERATIONS
        self._num_begun += 1
        key, folder = f"snapshot/{self._num_begun}", self._memory.folder / str(generation)
        try:
            state = self._write_samples(folder, roles, files)
        except OSError as error:
            self._fail(step, f"rank 0: {error_line(error)}")
            return
        calls = {role: controller[role].begin_snapshot(key, generation) for role in roles}
        plans = {
            role: dict(zip(controller[role].layout.ranks, call.get(), strict=True)) for role, call in calls.items()
        }
        record = Record(step, run_owner.number() or 0, generation, state, metric, [])
        pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._under_way = step, pool.submit(self._commit, record, key, plans, start)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the snapshot in progress."""
        if self._under_way is None:
            return
        step, committed = self._under_way
        self._under_way = None
        try:
            self._seconds, self.step = committed.result(), step
        except Exception as error:
            self._fail(step, error.args[0] if isinstance(error, SaveError) else f"rank 0: {error_line(error)}")

    def metrics(self) -> dict[str, float]:
        """Seconds of the snapshot that was completed last, once."""
        if self._under_way is not None and self._under_way[1].done():
            self.wait()
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"perf/snapshot_seconds": seconds}

    def _fail(self, step: int, problem: str) -> None:
        self._memory = None
        before = f"; the one of step {self.step} stays" if self.step is not None else ""
        log.warning(
            "the snapshot of step %d in memory of the nodes could not be written: %s; training continues without "
            "snapshots%s",
            *(step, problem, before),
        )

    def _write_samples(
        self, folder: Path, roles: tuple[str, ...], files: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write samples that wait for training, in the run's folder because all ranks write them, and move them into
        memory. Returns the contents of trainer.json."""
        assert self._memory is not None
        shared = self._root / SHARED
        shutil.rmtree(shared, ignore_errors=True)
        run_owner.check()
        shared.mkdir()
        state = files(shared)
        folder.mkdir(exist_ok=True)
        for old in [path for path in folder.iterdir() if path.name not in roles]:
            shutil.rmtree(old)
        for path in shared.iterdir():
            shutil.copytree(path, folder / path.name)
        shutil.rmtree(shared)
        return state

    def _commit(self, record: Record, key: str, plans: Mapping[str, Plans], start: float) -> float:
        """Wait for all parts and write the record, on the thread. Returns the seconds of the snapshot."""
        assert self._memory is not None
        folder = self._memory.folder / str(record.generation)
        parts = wait_for_parts(self._key_values, key, plans)
        files = [entry for of_role in parts.values() for part in of_role for entry in part.files]
        files += [self._description(folder / role, list(plans[role].values()), parts[role]) for role in plans]
        own = [name for name in files_below(folder) if name.split("/")[0] not in plans]
        files += [hash_file(folder / name, name) for name in own]
        replace_json(self._memory.folder / RECORD, asdict(record) | {"files": [asdict(entry) for entry in files]})
        spans.add_beside("snapshot", f"snapshot of step {record.step}", start, time.perf_counter())
        return time.perf_counter() - start

    def _description(self, path: Path, plans: Sequence[SavePlan | None], parts: Sequence[SavedPart]) -> FileEntry:
        """The entry of `.metadata` of a role, which is written where the ranks' files are new."""
        from hpcrl.engine.checkpoint.sharded_save import describe

        key, new = (int(path.parent.name), path.name), [plan for plan in plans if plan is not None]
        if new:
            path.mkdir(exist_ok=True)
            self._described[key] = describe(path, new, parts)
        return self._described[key]


def _has_room(memory: NodeMemory, needed: Mapping[str, int]) -> bool:
    for node, nbytes in needed.items():
        if nbytes > memory.free[node]:
            log.warning(
                "no snapshots: they need %s in %s on %s, where %s are free; lower the memory that other data takes "
                "there, or set trainer.checkpoint.snapshot_dir",
                *(size(nbytes), memory.folder.parent, node, size(memory.free[node])),
            )
            return False
    return True
