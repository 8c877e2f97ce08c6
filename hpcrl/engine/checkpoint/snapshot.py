"""Snapshots of a model and its optimizer in memory of the nodes: the files of a checkpoint, overwritten in place.

Each rank has two files per role and overwrites them in turn, because new pages of memory cost more than the copy. A
tensor is copied once, to where torch.save would have written it; a thread hashes the file and sends it to the next
node.
"""

from __future__ import annotations

import io
import mmap
import os
import socket
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch

from hpcrl.engine.checkpoint.manifest import FileEntry, SavedPart, error_line
from hpcrl.engine.checkpoint.sharded_load import Window
from hpcrl.engine.checkpoint.sharded_save import copy_all, file_name, state_of
from hpcrl.runtime.node_memory import NodeMemory
from hpcrl.runtime.spans import spans
from hpcrl.sandbox.foreign_files import open_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from hpcrl.engine.engine import TrainEngine
    from hpcrl.runtime.groups import RoleGroups

ALIGNMENT = 64  # bytes, of each tensor in a file
ZIP_HEADER = 30  # bytes of a record's header before its name and extra field
Report = Callable[[SavedPart], None]


class TensorFile:
    """A mapped file with what torch.save writes for each tensor, except the checksums of zip, which torch ignores.

    tensors: views of the file; what is copied into them is in it. pieces: start and length of each, in bytes.
    """

    def __init__(self, path: Path, like: Sequence[torch.Tensor]) -> None:
        """A new file for tensors of these shapes and types. Raises OSError if there is no room."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.pieces: list[tuple[int, int]] = []
        with open(path, "xb", buffering=0) as file:
            for tensor in like:
                self.pieces.append(_write_without_data(file, tensor))
            if self.pieces:  # else a write to memory that is not there would kill the rank
                os.posix_fallocate(file.fileno(), 0, file.tell())
        self._file = open(path, "r+b")
        self.descriptor = self._file.fileno()
        self.map = mmap.mmap(self.descriptor, 0) if self.pieces else b""
        starts = [_start_of_data(self._file, *piece) for piece in self.pieces]
        self.tensors = [_view(self.map, start, tensor) for start, tensor in zip(starts, like, strict=True)]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        return [(it.shape, it.dtype) for it in tensors] == [(it.shape, it.dtype) for it in self.tensors]


def _write_without_data(file: io.RawIOBase, tensor: torch.Tensor) -> tuple[int, int]:
    """Write what torch.save does, with a hole in place of the data; returns start and length."""
    start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    file.write(bytes(start - file.tell()))
    with torch.serialization.skip_data():
        torch.save(torch.empty(tensor.shape, dtype=tensor.dtype), file)  # type: ignore[arg-type]
    return start, file.tell() - start


def _start_of_data(file: io.BufferedRandom, start: int, length: int) -> int:
    """Place of the data of the only tensor in this part of a file."""
    with zipfile.ZipFile(io.BufferedReader(Window(file, start, length))) as archive:
        (record,) = [it for it in archive.infolist() if it.filename.endswith("/data/0")]
    file.seek(start + record.header_offset)
    header = file.read(ZIP_HEADER)
    return (
        start
        + record.header_offset
        + ZIP_HEADER
        + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    )


def _view(content: mmap.mmap | bytes, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(content, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


class RoleSnapshots:
    """One rank's part of the snapshots of a role."""

    def __init__(self, engine: TrainEngine, groups: RoleGroups, memory: NodeMemory) -> None:
        self._engine, self._groups, self._memory = engine, groups, memory
        self._files: dict[int, TensorFile] = {}  # by generation

    def begin(self, generation: int, report: Report) -> SavePlan | None:
        """Copy the state into the files of this generation, which nothing reads now. A thread completes and reports the
        part. Returns the plan of a file that is new, and None if it is that of the file's earlier snapshot."""
        plan, small = None, dict[str, bytes]()
        try:
            state = state_of(self._engine, self._groups)
            small, file = state.small, self._files.get(generation)
            if file is None or not file.fits(state.tensors):
                file = self._files[generation] = TensorFile(
                    self._folder(generation) / file_name(self._groups), state.tensors
                )
                plan = state.plan
            copy_all(state.tensors, file.tensors)
        except OSError as error:
            report(self._part(problem=error_line(error)))
            return None
        Thread(target=self._work, args=(generation, file, small, report), name="snapshot", daemon=True).start()
        return plan

    def _folder(self, generation: int) -> Path:
        return self._memory.folder / str(generation) / self._groups.role

    def _work(self, generation: int, file: TensorFile, small: dict[str, bytes], report: Report) -> None:
        began = time.perf_counter()
        try:
            folder = self._folder(generation)
            files = [self._copied(folder / file_name(self._groups), file.descriptor, file.map)]
            for name, content in small.items():
                (folder / name).write_bytes(content)
                with open_file(folder / name, links=False) as source:
                    files.append(self._copied(folder / name, source.fileno(), content))
            part = self._part(files, file.pieces)
        except Exception as error:  # a failed snapshot must not end the run
            part = self._part(problem=error_line(error))
        spans.add_beside(f"snapshot {self._groups.role}", "copy snapshot", began, time.perf_counter())
        report(part)

    def _copied(self, path: Path, descriptor: int, content: mmap.mmap | bytes) -> FileEntry:
        """The entry of a file, once the next node has a copy."""
        place = path.relative_to(self._memory.folder).as_posix()
        digest = self._memory.copy(place, descriptor, content)
        return FileEntry(place.partition("/")[2], len(content), digest)

    def _part(
        self,
        files: list[FileEntry] | None = None,
        pieces: list[tuple[int, int]] | None = None,
        problem: str | None = None,
    ) -> SavedPart:
        who = f"rank {self._groups.rank} on {socket.gethostname()}: "
        return SavedPart(self._groups.rank, files or [], pieces or [], problem and who + problem)
