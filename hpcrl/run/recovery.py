"""What a restart recovers: the newest snapshot in memory of its nodes, as a checkpoint, and finished responses."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from hpcrl.config.paths import expanded
from hpcrl.config.schema import Config
from hpcrl.engine.checkpoint.manifest import MANIFEST, FileEntry, HashedFile, error_line, hash_file
from hpcrl.engine.checkpoint.store import CheckpointStore, fsync
from hpcrl.forecast.memory.memory import size
from hpcrl.observe.record.archive import generation_logs
from hpcrl.run.saver import checkpoint_store
from hpcrl.runtime import run_owner
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.node_memory import NodeMemory, check_folder, folder_in
from hpcrl.runtime.world import World, before_mpi_finalize
from hpcrl.sandbox.foreign_files import open_file, read_bytes, read_json

log = logging.getLogger(__name__)

RECORD = "snapshot.json"
CHUNK = 8 << 20  # bytes
MOST_NAMED = 3  # files in a warning


@dataclass(frozen=True)
class Record:
    """The newest complete snapshot. owner: number of the job that wrote it. files: below the folder `generation`, as in
    a checkpoint."""

    step: int
    owner: int
    generation: int
    state: dict[str, Any]
    metric: float | None
    files: list[FileEntry]

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record in a folder of this node; None if there is none."""
        try:
            check_folder(folder)
            found = read_json(folder / RECORD, links=False)
            files = [FileEntry(**entry) for entry in found.pop("files")]
            if any(PurePosixPath(entry.path).is_absolute() or ".." in entry.path.split("/") for entry in files):
                return None
            return cls(files=files, **found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def memory_folder(config: Config) -> Path:
    """The run's folder in memory of this node."""
    return folder_in(expanded(config.trainer.checkpoint.snapshot_dir), run_directory(config))


def open_memory(world: World, config: Config) -> NodeMemory | None:
    """Make the run's folders for new snapshots, without what an earlier attempt left in them; None without snapshots.
    Collective."""
    if not config.trainer.snapshot_freq:
        return None
    one_host = all(size == world.size for size in world.all_gather_object(world.local_size))
    memory = NodeMemory.open(world.comm, memory_folder(config), one_host)
    if isinstance(memory, str):
        if world.rank == 0:
            log.warning("no snapshots: %s", memory)
        return None
    before_mpi_finalize(memory.close)
    return memory


def recover(world: World, config: Config) -> None:
    """Make a checkpoint of the newest snapshot that the nodes have, if it is newer than all checkpoints. Collective.

    Any node may have any file, and the number of ranks may have changed.
    """
    if not config.trainer.snapshot_freq or config.trainer.resume_mode == "disable":
        return
    began, folder = time.perf_counter(), memory_folder(config)
    store = checkpoint_store(config.trainer, run_directory(config) / "checkpoints")
    here = _ranks_here(world)
    records = world.all_gather_object(Record.read(folder) if here[0] == world.rank else None)
    record = max(filter(None, records), key=lambda it: it.step, default=None)
    saved = world.broadcast_object(next((step for step, _ in store.listed()), 0) if world.rank == 0 else 0)
    if record is None or record.step <= saved or record.owner >= (run_owner.number() or 0):
        return
    source, share = folder / str(record.generation), record.files[here.index(world.rank) :: len(here)]
    intact = world.all_gather_object([entry.path for entry in share if _is_intact(source, entry)])
    readers = {path: rank for rank, paths in reversed(list(enumerate(intact))) for path in paths}
    problem = _missing([entry.path for entry in record.files if entry.path not in readers])
    if problem is None:
        own = [entry for entry in record.files if readers[entry.path] == world.rank]
        problem = _write(world, store, record, source, own)
    if world.rank == 0:
        _report(record, problem, saved, time.perf_counter() - began)


def _ranks_here(world: World) -> list[int]:
    """The ranks on this node."""
    nodes = world.all_gather_object(node_name())
    return [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]


def _is_intact(source: Path, entry: FileEntry) -> bool:
    path = source / entry.path
    try:
        open_file(path, source, links=False).close()
        return path.stat().st_size == entry.bytes and hash_file(path, entry.path) == entry
    except OSError:
        return False


def _missing(paths: Sequence[str]) -> str | None:
    if not paths:
        return None
    more = f" and {len(paths) - MOST_NAMED} more files" if len(paths) > MOST_NAMED else ""
    return f"no node has {', '.join(paths[:MOST_NAMED])}{more}"


def _write(world: World, store: CheckpointStore, record: Record, source: Path, own: Sequence[FileEntry]) -> str | None:
    """Write the files, each rank its own, and commit the checkpoint. Returns the first problem. Collective."""

    def attempt(action: Callable[[], object]) -> str | None:
        problem = None
        try:
            action()
        except OSError as error:
            problem = f"rank {world.rank}: {error_line(error)}"
        return next(filter(None, world.all_gather_object(problem)), None)

    def commit() -> None:
        if world.rank == 0:
            run_owner.check()
            store.commit(record.step, record.state, record.files, record.metric)

    problem = attempt(lambda: store.begin(record.step) if world.rank == 0 else None)
    problem = problem or attempt(lambda: _copy(source, store.pending(record.step), own)) or attempt(commit)
    if problem is not None and world.rank == 0:
        store.discard(record.step)
    return problem


def _copy(source: Path, target: Path, entries: Sequence[FileEntry]) -> None:
    for entry in entries:
        path = target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(source / entry.path, source, links=False) as file, HashedFile(path) as written:
            while chunk := file.read(CHUNK):
                written.write(chunk)
        if written.entry(entry.path) != entry:
            raise OSError(errno.EIO, "it has changed while it was read", str(source / entry.path))
        fsync(path.parent)


def _report(record: Record, problem: str | None, saved: int, seconds: float) -> None:
    if problem is None:
        total = size(sum(entry.bytes for entry in record.files))
        log.info("recovered step %d from memory of the nodes: %s in %.1f s", record.step, total, seconds)
        return
    instead = f"the checkpoint of step {saved}" if saved else "no checkpoint"
    log.warning(
        "the snapshot of step %d in memory of the nodes cannot be used: %s; continuing from %s",
        *(record.step, problem, instead),
    )


@dataclass(frozen=True)
class DurableRollouts:
    """Lives on rank 0; the generation logs of all ranks in `folder` (hpcrl/observe/record/archive.py).

    A restart continues from checkpoint c and can use responses that the weights of c have drawn: those of step c + 1,
    and of the next `num_ahead` steps if generation is ahead of training. Logs of the current step are kept as well,
    because a planned stop in the middle of it saves the checkpoint before it.
    """

    folder: Path
    resumed_at: int  # steps done at the start, 0 without a checkpoint
    num_ahead: int = 0
    enabled: bool = True

    def resume(self) -> int | None:
        """Remove logs that this attempt cannot use. Returns the version of the weights whose responses it can use, or
        None."""
        self._keep(lambda step: self.enabled and self._is_after(step, self.resumed_at))
        return self.resumed_at if any(generation_logs(self.folder)) else None

    def step_ended(self, step: int, *, saved: int, perhaps: Collection[int | None] = ()) -> None:
        """Remove logs that a restart would not use.

        Args:
            saved: step of the newest complete checkpoint, 0 without one.
            perhaps: steps of a checkpoint that is being written, which may still fail, and of the newest snapshot.
        """
        bases = [saved, *(base for base in perhaps if base is not None)]
        self._keep(lambda other: other > step or any(self._is_after(other, base) for base in bases))

    def run_ended(self) -> None:
        """Remove all logs, because all steps are done."""
        self._keep(lambda step: False)

    def _is_after(self, step: int, checkpoint: int) -> bool:
        return checkpoint < step <= checkpoint + 1 + self.num_ahead

    def _keep(self, is_needed: Callable[[int], bool]) -> None:
        for step, path in generation_logs(self.folder):
            if not is_needed(step):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot remove %s: %s", path, error.strerror)


def bring_back(aside: Path, folder: Path) -> None:
    """Move generation logs back from a folder that was set aside: a run that starts anew has the same start weights."""
    for _, path in generation_logs(aside):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)


def origin_of(start_weights: Path | None) -> str:
    """A name for the weights in a checkpoint: their hash, because another job may have overwritten the folder."""
    manifest = start_weights / MANIFEST if start_weights is not None else None
    if manifest is None or not manifest.is_file():
        return str(start_weights)
    return blake2b(read_bytes(manifest), digest_size=16).hexdigest()
