"""The folder of checkpoints: what is written appears whole or not at all, and a damaged one is passed over.

    checkpoints/step_00000020/{actor,critic}/   sharded state, written by all ranks (checkpoint/sharded.py)
    checkpoints/step_00000020/trainer.json      the loop's own state
    checkpoints/step_00000020/manifest.json     every file with its size and hash
    checkpoints/latest                          name of the newest; for people, resume scans instead

Rank 0 calls everything here except `pending`, `fsync_tree` and `read_trainer_state`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.manifest import verify, write_manifest
from hpcrl.launch.exits import InputError

TRAINER_FILE = "trainer.json"
LATEST = "latest"
_STEP_FOLDER = re.compile(r"step_(\d{8,})(\.replaced)?")


class CheckpointStore:
    """`root` is the `checkpoints` folder of a run; `keep` is how many checkpoints stay, None for all."""

    def __init__(self, root: str | os.PathLike[str], *, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}; at least 1, or None to keep all")
        self.root = Path(root)
        self._keep = keep

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def pending(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it is committed."""
        return self.root / f"step_{step:08d}.tmp"

    def begin(self, step: int) -> Path:
        """An empty folder to write into. The other ranks may use `pending(step)` once rank 0 is back from here."""
        pending = self.pending(step)
        if pending.exists():
            shutil.rmtree(pending)
        pending.mkdir(parents=True)
        return pending

    def commit(self, step: int, trainer_state: dict[str, Any]) -> Path:
        """Make the checkpoint of `step` count, after all ranks have written and fsynced their files.

        A kill between any two operations leaves this checkpoint whole or the one before it whole.
        """
        pending, final, aside = self.pending(step), self.folder(step), self.root / f"step_{step:08d}.replaced"
        state = json.dumps({**trainer_state, "step": step}, indent=1, allow_nan=False)
        (pending / TRAINER_FILE).write_text(state, encoding="utf-8")
        write_manifest(pending)
        fsync_tree(pending)
        if final.exists():
            # No rename replaces a folder that has files; until the new one is in place this name still counts.
            _remove(aside)
            os.replace(final, aside)
        os.replace(pending, final)
        _fsync(self.root)
        self._write_latest(final.name)
        self._drop_old(step)
        return final

    def newest_valid(self, report: Callable[[str], None]) -> tuple[int, Path, dict[str, Any]] | None:
        """(step, folder, trainer state) of the newest checkpoint that is whole, by looking at all of them.

        Each damaged one that is passed over is reported in a line that names the file and what is used instead.
        """
        damaged: list[str] = []
        found = None
        for step, folder in _candidates(self.root):
            try:
                found = step, folder, read_trainer_state(folder)
                break
            except InputError as error:
                damaged.append(str(error))
        instead = f"using {found[1].name} instead" if found else "no other checkpoint is whole"
        for line in damaged:
            report(f"{line}; {instead}")
        return found

    def _write_latest(self, name: str) -> None:
        temporary = self.root / f"{LATEST}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(name + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.root / LATEST)
        _fsync(self.root)

    def _drop_old(self, newest: int) -> None:
        """Keep the newest `keep` up to the one just written. Later ones, of an abandoned future, are left alone."""
        for aside in self.root.glob("step_*.replaced"):
            if aside.with_suffix("").exists():
                _remove(aside)
        for leftover in self.root.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self._keep is None:
            return
        for _, folder in [(step, folder) for step, folder in _candidates(self.root) if step <= newest][self._keep :]:
            _remove(folder)


def read_trainer_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of trainer.json of a checkpoint that is whole; otherwise InputError, naming the damaged file."""
    problems = verify(folder)
    if problems:
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise InputError(f"damaged checkpoint {folder}: {problems[0]}{more}")
    try:
        state = json.loads((Path(folder) / TRAINER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"damaged checkpoint {folder}: {TRAINER_FILE}: {error}") from None
    if not isinstance(state, dict):
        raise InputError(f"damaged checkpoint {folder}: {TRAINER_FILE} is not a JSON object")
    return state


def load_path(path: str | os.PathLike[str], report: Callable[[str], None]) -> Path:
    """The step folder that `path` means: a run directory, its checkpoints folder, or one step folder.

    Of several, the newest that is whole. Raises InputError where there is none.
    """
    start = Path(path)
    if not start.is_dir():
        raise InputError(f"no checkpoint at {path}: no such folder; run the job that makes it (hpcrl sft ...) first")
    if (start / TRAINER_FILE).exists() or _STEP_FOLDER.fullmatch(start.name):
        read_trainer_state(start)
        return start
    root = start / "checkpoints" if (start / "checkpoints").is_dir() else start
    found = CheckpointStore(root, keep=None).newest_valid(report)
    if found is None:
        raise InputError(
            f"no whole checkpoint at {path}; expected a run directory, its checkpoints folder or one step folder"
        )
    return found[1]


def fsync_tree(folder: str | os.PathLike[str]) -> None:
    """Put every file and folder below `folder` on disk. Each node must do it for the files that it wrote."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _fsync(Path(parent) / name)
        _fsync(Path(parent))


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """(step, folder), newest first; a folder set aside comes after the one that replaces it."""
    found = []
    for path in root.glob("step_*"):
        name = _STEP_FOLDER.fullmatch(path.name)
        if name and path.is_dir():
            found.append((int(name[1]), name[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _remove(folder: Path) -> None:
    """By renaming first: a half-removed checkpoint must not look like a damaged one."""
    if not folder.exists():
        return
    doomed = folder.with_name(folder.name + ".tmp")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.replace(folder, doomed)
    # A file that someone has open on NFS cannot go now; the next commit sweeps what is left.
    shutil.rmtree(doomed, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
