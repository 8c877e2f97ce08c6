"""The folder of checkpoints. Each appears completely or not at all; damaged ones are skipped, old ones are removed.

    checkpoints/step_00000020/{actor,critic}/   sharded state, written by all ranks (engine/checkpoint/sharded_save.py)
    checkpoints/step_00000020/trainer.json      the loop's own state
    checkpoints/step_00000020/manifest.json     every file with its size and hash
    checkpoints/latest                          name of the newest; for people, resume scans instead

Rank 0 calls everything here except `fsync` and `read_trainer_state`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.engine.checkpoint.manifest import FileEntry, verify, write_manifest
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import read_json


@dataclass(frozen=True)
class Retention:
    """Keep the `last` checkpoints, those of steps that `every` divides, and the `best`.

    last: None keeps all. best counts those with a value of `metric`, larger ones first if `larger_is_better`, newer
    ones first among equals.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    larger_is_better: bool = True

    def steps_to_drop(self, values: Mapping[int, float | None]) -> set[int]:
        """Return the steps to remove.

        Args:
            values: step -> value of the metric, of all checkpoints; the newest is always kept.
        """
        if self.last is None:
            return set()
        newest_first = sorted(values, reverse=True)
        to_keep = set(newest_first[: self.last])
        to_keep |= {step for step in newest_first if self.every is not None and step % self.every == 0}
        sign = 1.0 if self.larger_is_better else -1.0
        valued = [(sign * value, step) for step, value in values.items() if value is not None and not math.isnan(value)]
        to_keep |= {step for _, step in sorted(valued, reverse=True)[: self.best or 0]}
        return set(values) - to_keep


log = logging.getLogger(__name__)
TRAINER_FILE = "trainer.json"
LATEST = "latest"
# Types of the entries of trainer.json, which is untrusted.
STATE_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("step", "consumed_rows", "consumed_pairs"), int),
    "epoch": (int, float),
    "init_from": (str, type(None)),
    "job": str,
    "surplus": bool,
    **dict.fromkeys(("roles", "under_way", "seen", "command"), list),
    **dict.fromkeys(("frozen", "kl_ctrl", "sampler", "counts", "ahead", "unlogged", "rows", "versions"), dict),
}
_STEP_FOLDER = re.compile(r"step_(\d{8,})(\.replaced)?")


class CheckpointStore:
    """Checkpoints of a run; `root` is its `checkpoints` folder."""

    def __init__(self, root: str | os.PathLike[str], retention: Retention | None = None) -> None:
        self.root = Path(root)
        self._retention = retention or Retention()
        self._has_removed = False

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def pending(self, step: int) -> Path:
        """Folder in which the checkpoint of `step` is written before it is committed."""
        return self.root / f"step_{step:08d}.tmp"

    def begin(self, step: int) -> Path:
        """Create an empty folder to write into."""
        pending = self.pending(step)
        if pending.exists():
            shutil.rmtree(pending)
        pending.mkdir(parents=True)
        return pending

    def commit(
        self, step: int, trainer_state: dict[str, Any], written: Sequence[FileEntry] = (), metric: float | None = None
    ) -> Path:
        """Commit the checkpoint of `step`, after all ranks have written and fsynced their files.

        A kill at any point leaves this checkpoint or the previous one complete. Raises OSError if it failed; then call
        `discard`.

        Args:
            written: the files of all ranks, which are not read again.
            metric: value of the retention's metric at this step.
        """
        pending, final, replaced = self.pending(step), self.folder(step), self.root / f"step_{step:08d}.replaced"
        best = {"best_metric": {"name": self._retention.metric, "value": metric}} if self._retention.metric else {}
        state = json.dumps({**trainer_state, **best, "step": step}, indent=1, allow_nan=False)
        (pending / TRAINER_FILE).write_text(state, encoding="utf-8")
        write_manifest(pending, written)
        _fsync_tree(pending, without={entry.path for entry in written})
        if final.exists():
            # rename cannot replace a non-empty folder; until the new one is in place the set-aside name counts.
            _remove(replaced)
            os.replace(final, replaced)
        os.replace(pending, final)
        try:
            fsync(self.root)
            self._write_latest(final.name)
            self._drop_old(step)
        except OSError as error:
            log.warning("%s is saved, but updating the checkpoints folder failed: %s", final, error)
        return final

    def discard(self, step: int) -> None:
        """Remove what a failed save has written; the next commit removes the rest."""
        shutil.rmtree(self.pending(step), ignore_errors=True)

    def listed(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of each checkpoint, newest first, without verification."""
        found: dict[int, Path] = {}
        for step, folder in _candidates(self.root):
            found.setdefault(step, folder)
        return list(found.items())

    def newest(self) -> str | None:
        """Return the name of the newest checkpoint, without verification."""
        return next((folder.name for _, folder in _candidates(self.root)), None)

    def newest_valid(self, report: Callable[[str], None]) -> tuple[int, Path, dict[str, Any]] | None:
        """Return (step, folder, trainer state) of the newest complete checkpoint.

        Each damaged one that is skipped is reported in one line, with the damaged file and the checkpoint used instead.
        """
        damaged: list[str] = []
        newest = None
        for step, folder in _candidates(self.root):
            try:
                newest = step, folder, read_trainer_state(folder)
                break
            except InputError as error:
                damaged.append(str(error))
        instead = f"using {newest[1].name} instead" if newest else "no other checkpoint is complete"
        for line in damaged:
            report(f"{line}; {instead}")
        return newest

    def _write_latest(self, name: str) -> None:
        temporary = self.root / f"{LATEST}.tmp"
        temporary.write_text(name + "\n", encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, self.root / LATEST)
        fsync(self.root)

    def _drop_old(self, newest: int) -> None:
        """Apply retention up to the newest step. Later checkpoints, of an abandoned run, are kept."""
        for replaced in self.root.glob("step_*.replaced"):
            if replaced.with_suffix("").exists():
                _remove(replaced)
        for leftover in self.root.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        complete = [(step, folder) for step, folder in _candidates(self.root) if step <= newest]
        steps_to_drop = self._retention.steps_to_drop({step: self._metric_of(folder) for step, folder in complete})
        for folder in (folder for step, folder in complete if step in steps_to_drop):
            if not self._has_removed:
                self._has_removed = True
                log.info(
                    "removing %s: trainer.max_ckpt_to_keep=%s keeps the newest, null all; this is logged once",
                    *(folder, self._retention.last),
                )
            _remove(folder)

    def _metric_of(self, folder: Path) -> float | None:
        """Return the retention's metric from trainer.json; None if it has none, or is damaged."""
        if self._retention.metric is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            best = read_json(folder / TRAINER_FILE)["best_metric"]
            return float(best["value"]) if best["name"] == self._retention.metric else None
        return None


def read_trainer_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return trainer.json of a complete checkpoint. Raises InputError with the damaged file."""
    problems = verify(folder)
    if problems:
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise InputError(f"damaged checkpoint {folder}: {problems[0]}{more}")
    try:
        state = read_json(Path(folder) / TRAINER_FILE, links=False)
    except (OSError, ValueError) as error:
        raise InputError(f"damaged checkpoint {folder}: {TRAINER_FILE}: {error}") from None
    if not isinstance(state, dict):
        raise InputError(f"damaged checkpoint {folder}: {TRAINER_FILE} is not a JSON object")
    for name in STATE_TYPES.keys() & state.keys():
        if not isinstance(state[name], STATE_TYPES[name]):
            kind = type(state[name]).__name__
            raise InputError(f"damaged checkpoint {folder}: {TRAINER_FILE}: {name} is a {kind}")
    return state


def load_path(path: str | os.PathLike[str], report: Callable[[str], None]) -> Path:
    """Return the step folder of `path`: a run directory, its checkpoints folder, or one step folder.

    Of several, the newest complete one. A Hugging Face directory is returned unchanged. Raises InputError if there is
    none.
    """
    start = Path(path)
    if not start.is_dir():
        raise InputError(f"no checkpoint at {path}: no such folder; run the job that writes it, or download the model")
    if is_hugging_face(start):
        return start
    if (start / TRAINER_FILE).exists() or _STEP_FOLDER.fullmatch(start.name):
        read_trainer_state(start)
        return start
    root = start / "checkpoints" if (start / "checkpoints").is_dir() else start
    newest = CheckpointStore(root).newest_valid(report)
    if newest is None:
        raise InputError(
            f"no complete checkpoint at {path}; expected a run directory, its checkpoints folder or one step folder"
        )
    return newest[1]


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder holds weights as written by `save_pretrained`; runs and checkpoints have no such file."""
    return (folder / "config.json").is_file()


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(folder: Path, without: Collection[str]) -> None:
    """Flush every folder and file below `folder` to disk, except files that other ranks have flushed."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            if path.relative_to(folder).as_posix() not in without:
                fsync(path)
        fsync(Path(parent))


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Return (step, folder), newest first; a folder set aside comes after the one that replaces it."""
    found = []
    for path in root.glob("step_*"):
        name = _STEP_FOLDER.fullmatch(path.name)
        if name and path.is_dir():
            found.append((int(name[1]), name[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _remove(folder: Path) -> None:
    """Remove a folder, after renaming it: a partly removed checkpoint must not look like a damaged one."""
    if not folder.exists():
        return
    removed = folder.with_name(folder.name + ".tmp")
    if removed.exists():
        shutil.rmtree(removed)
    os.replace(folder, removed)
    # Files that are open on NFS cannot be removed now; the next commit removes the rest.
    shutil.rmtree(removed, ignore_errors=True)
