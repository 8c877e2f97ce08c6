"""A model and its optimizer on their way to disk: copied on the spot, written by a thread while training goes on.

The format is megatron `dist_checkpointing`'s ("torch_dist"). Each rank writes one file, from a thread that knows
nothing of MPI; megatron's asynchronous writer forks a process, which MPI does not survive.
"""

from __future__ import annotations

import io
import json
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hpcrl.checkpoint.hashed_file import HashedFile
from hpcrl.checkpoint.manifest import FileEntry, hash_file
from hpcrl.checkpoint.scratch import write_file
from hpcrl.checkpoint.store import fsync
from hpcrl.launch import platform

if TYPE_CHECKING:
    from hpcrl.grid.groups import RoleGroups

Staged = list[tuple[WriteItem, torch.Tensor]]


class Savable(Protocol):
    """What can be saved: `hpcrl.engine.engine.TrainEngine`."""

    def sharded_state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SavedPart:
    """What a rank tells of its part. problem: one line, where it could not be written. seconds: until it was."""

    files: list[FileEntry]
    problem: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Written:
    """Of one rank, for the one that makes `.metadata`."""

    plan: SavePlan
    results: list[WriteResult]
    problem: str | None = None


class ShardedSave:
    """One rank's part of a save into the folder `path`, which is the role's own in a checkpoint.

    The state is copied to host memory at once and without communication; the copy goes when it is written.
    """

    def __init__(
        self,
        engine: Savable,
        path: Path,
        groups: RoleGroups,
        scratch: str | None = None,
        memory: list[torch.Tensor] | None = None,
    ) -> None:
        """scratch: folder on this node to which the file is written first. memory: what the copy is made into; a caller
        who keeps it for the next save saves the pages of new memory, which cost more than the copying."""
        self._path, self._groups, self._scratch = path, groups, scratch
        self._start, self._seconds = time.perf_counter(), 0.0
        self._is_first = groups.rank == groups.layout.ranks[0]
        with platform.cpu_bridge(), torch.no_grad():
            sharded, common = save_preprocess(engine.sharded_state_dict(), validate_access_integrity=False)
            mine, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
            planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            planner.set_up_planner(torch_dist.mcore_to_pyt_state_dict(mine), is_coordinator=self._is_first)
            self._plan = planner.create_local_plan()
            copies = _copied(
                [planner.resolve_data(item) for item in self._plan.items], memory if memory is not None else []
            )
        small = _same_on_all_ranks(common) if self._is_first else {}
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[tuple[list[FileEntry], list[WriteResult]]] = pool.submit(
            self._write, list(zip(self._plan.items, copies, strict=True)), small
        )
        pool.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether `finish` would wait for no disk."""
        return self._written.done()

    def finish(self) -> SavedPart:
        """Wait for this rank's file; then, collective over the role's ranks, the first of them describes them all.

        Where any rank has a problem there is no description, and the folder is no checkpoint.
        """
        files: list[FileEntry] = []
        written = _Written(self._plan, [])
        try:
            files, results = self._written.result()
            written = _Written(self._plan, results)
        except OSError as error:
            written = _Written(self._plan, [], self._told(error))
        everyone = self._gathered(written)
        problem = written.problem
        if self._is_first and all(part.problem is None for part in everyone):
            try:
                files.append(self._describe(everyone))
            except OSError as error:
                problem = self._told(error)
        return SavedPart(files, problem, self._seconds)

    def _write(self, staged: Staged, small: dict[str, bytes]) -> tuple[list[FileEntry], list[WriteResult]]:
        """On the thread."""
        self._path.mkdir(parents=True, exist_ok=True)
        name = f"__{self._groups.layout.ranks.index(self._groups.rank)}_0.distcp"
        results: list[WriteResult] = []

        def write(file: HashedFile) -> None:
            results[:] = [_write_tensor(file, item, tensor) for item, tensor in staged]

        try:
            files = [write_file(self._path / name, write, self._scratch, then=staged.clear)]
        finally:
            staged.clear()
        for small_name, content in small.items():
            with HashedFile(self._path / small_name) as file:
                file.write(content)
            files.append(file.entry(small_name))
        fsync(self._path)
        self._seconds = time.perf_counter() - self._start
        return [self._placed(entry) for entry in files], results

    def _describe(self, everyone: list[_Written]) -> FileEntry:
        """`.metadata`: where each piece of each tensor is. Torch checks that the pieces are the whole."""
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner({}, is_coordinator=True)
        _, metadata = planner.create_global_plan([part.plan for part in everyone])
        dcp.FileSystemWriter(self._path).finish(metadata, [part.results for part in everyone])
        return self._placed(hash_file(self._path / ".metadata", ".metadata"))

    def _gathered(self, written: _Written) -> list[_Written]:
        """Of every rank, on the first one."""
        group, ranks = self._groups.pgc.intra_dist_opt, self._groups.layout.ranks
        everyone: list[Any] | None = [None] * len(ranks) if self._is_first else None
        dist.gather_object(written, everyone, dst=ranks[0], group=group)
        return everyone or []

    def _placed(self, entry: FileEntry) -> FileEntry:
        return FileEntry(f"{self._path.name}/{entry.path}", entry.bytes, entry.xxh3_128)

    def _told(self, error: OSError) -> str:
        return f"rank {self._groups.rank} on {socket.gethostname()}: {error.filename}: {error.strerror}"


def _copied(tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """In host memory, each in a storage of its own, for torch writes whole storages."""
    if [(old.shape, old.dtype) for old in memory] != [(tensor.shape, tensor.dtype) for tensor in tensors]:
        memory[:] = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors
        ]
    for copy, tensor in zip(memory, tensors, strict=True):
        copy.copy_(tensor)
    return memory


def _same_on_all_ranks(common: dict[str, Any]) -> dict[str, bytes]:
    """The files that one rank writes for all, name -> content."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
    return {COMMON_STATE_FNAME: buffer.getvalue(), CONFIG_FNAME: config.encode()}


def _write_tensor(file: HashedFile, item: WriteItem, tensor: torch.Tensor) -> WriteResult:
    start = file.size
    torch.save(tensor, file)  # type: ignore[arg-type]
    length = file.size - start
    return WriteResult(item.index, length, _StorageInfo(file.path.name, start, length))
