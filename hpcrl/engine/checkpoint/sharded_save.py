"""Saving of a model and its optimizer: copied to host memory, and written by a thread while training continues.

The format is megatron `dist_checkpointing`'s ("torch_dist"). Each rank writes one file, in a thread that does not use
MPI, and reports it to rank 0, which describes all files; so a checkpoint is complete as soon as it is written,
independent of what the ranks are doing. Megatron's asynchronous writer forks a process, which is not safe under MPI.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hpcrl.engine.checkpoint.manifest import FileEntry, HashedFile, SavedPart, error_line, hash_file, write_file
from hpcrl.engine.checkpoint.store import fsync
from hpcrl.runtime import platform, run_owner
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from hpcrl.engine.engine import TrainEngine
    from hpcrl.runtime.groups import RoleGroups

Staged = list[tuple[WriteItem, torch.Tensor]]


class ShardedSave:
    """One rank's part of a save into the folder `path`, which is the role's own in a checkpoint.

    The state is copied to host memory immediately and without communication; the copy is freed when it is written.
    """

    def __init__(
        self,
        engine: TrainEngine,
        path: Path,
        groups: RoleGroups,
        report: Callable[[SavedPart], None],
        scratch: str | None = None,
        memory: list[torch.Tensor] | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the save of this rank's part.

        Args:
            report: called by the thread when the part is written, or has a problem.
            scratch: folder on this node to write the file to first.
            memory: buffers of the copy; reuse them for the next save, because allocating new pages takes longer than
                the copy.
            on_progress: called by the thread during writing.
        """
        self._path, self._groups, self._scratch = path, groups, scratch
        self._report, self._on_progress = report, on_progress
        state = state_of(engine, groups)
        self.plan = state.plan
        copies = _copy_to_host(state.tensors, memory if memory is not None else [])
        staged = list(zip(self.plan.items, copies, strict=True))
        self._thread = Thread(target=self._work, args=(staged, state.small), name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the part is reported."""
        self._thread.join()

    def _work(self, staged: Staged, small: dict[str, bytes]) -> None:
        files: list[FileEntry] = []
        pieces: list[tuple[int, int]] = []
        problem = None
        began = time.perf_counter()
        try:
            files, pieces = self._write(staged, small)
        except Exception as error:  # a failed save must not end the run
            problem = f"rank {self._groups.rank} on {socket.gethostname()}: {error_line(error)}"
        spans.add_beside(f"save {self._path.name}", "write checkpoint", began, time.perf_counter())
        self._report(SavedPart(self._groups.rank, files, pieces, problem))

    def _write(self, staged: Staged, small: dict[str, bytes]) -> tuple[list[FileEntry], list[tuple[int, int]]]:
        run_owner.check()
        self._path.mkdir(parents=True, exist_ok=True)
        name = file_name(self._groups)
        pieces: list[tuple[int, int]] = []

        def write(file: HashedFile) -> None:
            pieces[:] = [_write_tensor(file, tensor) for _, tensor in staged]

        try:
            files = [write_file(self._path / name, write, self._scratch, staged.clear, self._on_progress)]
        finally:
            staged.clear()
        for small_name, content in small.items():
            with HashedFile(self._path / small_name) as file:
                file.write(content)
            files.append(file.entry(small_name))
        fsync(self._path)
        return [in_checkpoint(self._path, entry) for entry in files], pieces


class PartOfState(NamedTuple):
    """What a rank writes of a role's state. small: content of files that one rank writes for all, by name."""

    plan: SavePlan
    tensors: list[torch.Tensor]  # one for each item of the plan; they alias the trained ones
    small: dict[str, bytes]


def state_of(engine: TrainEngine, groups: RoleGroups) -> PartOfState:
    """This rank's part of the state, without communication."""
    is_first = groups.rank == groups.layout.ranks[0]
    with platform.cpu_bridge(), torch.no_grad():
        sharded, common = save_preprocess(engine.sharded_state_dict(), validate_access_integrity=False)
        own, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(torch_dist.mcore_to_pyt_state_dict(own), is_coordinator=is_first)
        plan = planner.create_local_plan()
        tensors = [planner.resolve_data(item) for item in plan.items]
    return PartOfState(plan, tensors, _same_on_all_ranks(common) if is_first else {})


def describe(path: Path, plans: Sequence[SavePlan], parts: Sequence[SavedPart]) -> FileEntry:
    """Write `.metadata` of a role's folder, the place of each piece of each tensor. On one rank, after all have
    written.

    `plans` and `parts` of the role's ranks, in its layout's order. Torch checks that the pieces are complete.
    """
    planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan(list(plans))
    results = [
        [
            WriteResult(item.index, length, _StorageInfo(_file_name(index), start, length))
            for item, (start, length) in zip(plan.items, part.pieces, strict=True)
        ]
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True))
    ]
    dcp.FileSystemWriter(path).finish(metadata, results)
    return in_checkpoint(path, hash_file(path / ".metadata", ".metadata"))


def in_checkpoint(path: Path, entry: FileEntry) -> FileEntry:
    """Return the entry of a file in a role's folder for the checkpoint's manifest."""
    return FileEntry(f"{path.name}/{entry.path}", entry.bytes, entry.xxh3_128)


def file_name(groups: RoleGroups) -> str:
    """File name of this rank's part."""
    return _file_name(groups.layout.ranks.index(groups.rank))


def _file_name(index: int) -> str:
    """File name of the rank at this place in the layout."""
    return f"__{index}_0.distcp"


def _copy_to_host(tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy to host memory, each tensor into its own storage, because torch writes whole storages."""
    if [(old.shape, old.dtype) for old in memory] != [(tensor.shape, tensor.dtype) for tensor in tensors]:
        memory[:] = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors
        ]
    copy_all(tensors, memory)
    return memory


def copy_all(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)


def _same_on_all_ranks(common: dict[str, Any]) -> dict[str, bytes]:
    """Return the files that one rank writes for all, name -> content."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
    return {COMMON_STATE_FNAME: buffer.getvalue(), CONFIG_FNAME: config.encode()}


def _write_tensor(file: HashedFile, tensor: torch.Tensor) -> tuple[int, int]:
    """Write a tensor; return its start and length."""
    start = file.size
    torch.save(tensor, file)  # type: ignore[arg-type]
    return start, file.size - start
