"""Weights & Biases: an offline run inside the run's folder, or what WANDB_MODE asks for."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcrl.observe.record.trackers import Row, Status, TrackedRun

BLOCK_BYTES = 32768


class WandbTracker:
    """A wandb run with the id of the training run.

    wandb cannot resume offline: of two offline folders with one id, the one that is synchronized last replaces the
    other. So each slice writes a folder with the whole history, and at its end removes those of earlier slices. Online,
    the server has the history: a step that it has already, of a slice that was lost, keeps its first values.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._is_offline = False
        self._num_rows = 0
        self._run: Any = None

    def open(self, history: Sequence[Row]) -> int:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports to its developers
        import wandb

        tracked, mode = self._tracked, os.environ.get("WANDB_MODE", "offline")
        self._is_offline = mode in ("offline", "dryrun")
        self._run = wandb.init(
            project=tracked.project,
            name=tracked.name,
            id=tracked.id,
            dir=str(tracked.folder),
            mode=mode,  # type: ignore[arg-type]
            config=dict(tracked.parameters),
            resume=None if self._is_offline else "allow",
            # What wandb would collect by itself describes this process, not the ranks
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )
        if self._is_offline:
            return -1
        self._run.config.update(dict(tracked.parameters), allow_val_change=True)
        return int(self._run.starting_step) - 1

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.metrics, step=row.step, commit=True)
        self._num_rows += len(rows)

    def finish(self, status: Status) -> None:
        import wandb

        if status == "requeued":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
        wandb.teardown()
        if self._is_offline:
            written = Path(self._run.settings.sync_dir)
            self._check(written)
            self._remove_all_but(written)

    def _check(self, folder: Path) -> None:
        """Raise OSError unless the offline folder has all rows. wandb logs an error of the disk, and continues."""
        from wandb.proto.wandb_internal_pb2 import Record

        (file,) = folder.glob("*.wandb")
        count = sum(Record.FromString(data).HasField("history") for data in read_records(file))
        if count != self._num_rows:
            raise OSError(f"{file.name} has {count} of {self._num_rows} steps; is the disk full?")

    def _remove_all_but(self, written: Path) -> None:
        for folder in written.parent.glob(f"offline-run-*-{self._tracked.id}"):
            if folder.resolve() != written.resolve():
                shutil.rmtree(folder, ignore_errors=True)


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, each a serialized wandb_internal_pb2.Record; the first torn one ends it.

    The file is a log of LevelDB in blocks of 32 KiB, after 7 bytes of its own. A fragment of a record has a CRC-32, a
    length and a type: 1 whole, 2 first, 3 middle, 4 last.
    """
    data = path.read_bytes()
    offset, record = 7, b""
    while offset + 7 <= len(data):
        if (room := BLOCK_BYTES - offset % BLOCK_BYTES) < 7:  # the rest of a block that has no room for a header
            offset += room
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        fragment = data[offset + 7 : offset + 7 + length]
        if kind not in (1, 2, 3, 4) or len(fragment) < length:
            return
        offset += 7 + length
        record = fragment if kind in (1, 2) else record + fragment
        if kind in (1, 4):
            yield record


TRACKER = WandbTracker
