"""Two starts of one run at a random distance, with kills of the one that owns its folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.runtime import run_owner
from hpcrl.sandbox.process_tree import process_runs
from tests.run.small_run import write_config
from tests.slurm.small_ppo import lines

PLUGIN = Path(__file__).with_name("owner_log.py")
HEARTBEAT = 1.0  # seconds
APART = 5.0  # seconds between two starts, at most
Start = Callable[[int, str], subprocess.Popen[str]]  # (number of the start, run.name) -> its launcher


def write_job(folder: Path) -> Path:
    run = {"dir": str(folder / "runs"), "plugins": [str(PLUGIN)], "owner_heartbeat_seconds": HEARTBEAT}
    # Without reuse: what a killed start had not generated would be drawn in smaller batches, with other last bits.
    trainer = {"total_training_steps": 4, "save_freq": 1, "reuse_rollouts": False}
    return write_config(folder, run=run, trainer=trainer)


def race(folder: Path, start: Start, whole: list[dict[str, Any]], number: int) -> dict[str, float]:
    """One race, of which half have a kill, and starts until the run is done. whole: metrics of one job without a race.

    Returns the number of owners, and the longest wait of one in seconds.
    """
    draw, name = random.Random(number), f"race_{number}"
    run, log = folder / "runs" / name, folder / "owner_log"
    log.write_text("")
    starts = [start(0, name)]
    time.sleep(draw.random() * APART)
    starts.append(start(1, name))
    if number % 2:
        time.sleep(draw.random() * APART)
        kill_owner(run)
    said, codes = [], []
    while True:
        for launcher in starts:
            said.append(launcher.communicate(timeout=120)[1])
            codes.append(launcher.returncode)
        if 0 in codes:
            break
        assert len(said) < 9, said
        starts = [start(len(said), name)]
    assert lines(run) == whole, said
    notes = [line.split() for line in log.read_text().splitlines()]
    owners, waits = [int(owner) for owner, _ in notes], [float(wait) for _, wait in notes]
    assert owners == sorted(owners), "a job wrote after another one had taken its folder"
    assert max(waits) < 5 * run_owner.HEARTBEATS_TO_TAKE * HEARTBEAT
    rejected = [text for text, code in zip(said, codes, strict=True) if "is in use by" in text and code]
    assert all(text.count("hpcrl: error:") == 1 for text in rejected), rejected
    return {"owners": len(set(owners)), "rejected": len(rejected), "waited": max(waits)}


def kill_owner(run: Path) -> None:
    found = run_owner.newest(run) if run.exists() else None
    if found is not None and found.owner is not None and process_runs(found.owner.pid, found.owner.started):
        os.kill(found.owner.pid, signal.SIGKILL)
