"""`hpcrl check --job` on two nodes of two ranks each, with something wrong; started by tests under mpiexec."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrl import cli
from hpcrl.machine import check_job

WRONG = sys.argv[1]
RANK = int(os.environ["PMI_RANK"])
os.environ["SLURMD_NODENAME"] = f"n{RANK // 2}"
check_job.see_canary = functools.partial(check_job.see_canary, timeout=1.0)
version = metadata.version


def another_version(name: str) -> str:
    return "2.6.0" if name == "torch" else version(name)


CHANNEL = f"Channel 00/0 : {RANK}[0] -> {(RANK + 1) % 4}[0] [send] via NET/Socket/0"
NCCL = {
    "tcp": f"INFO Using network Socket\nn NCCL INFO {CHANNEL}",
    "plugin": "WARN Error: network AWS Libfabric not found.",
}
start_torch = check_job.start_torch


def start_with_nccl(*arguments: Any, **options: Any) -> Any:
    """Start torch as if NCCL were used, and had written a log."""
    world = start_torch(*arguments, **options)
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(f"n NCCL INFO NCCL version 2.2{RANK // 3}.7\nn NCCL {NCCL[WRONG]}\n")
    if WRONG == "plugin" and RANK == 2:
        raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp")
    return dataclasses.replace(world, nccl_timeout=timedelta(seconds=300))


if WRONG in NCCL:
    check_job.start_torch = start_with_nccl
if WRONG == "version" and RANK == 3:
    metadata.version = another_version
if WRONG == "folder" and RANK >= 2:
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
if WRONG == "broken" and RANK == 3:
    check_job.see_canary = lambda path, token: 1 / 0
if WRONG == "dead":
    check_job.DEADLINE = 3.0
    if RANK == 1:
        check_job.ring_latencies = lambda comm: time.sleep(600)

if __name__ == "__main__":
    cli.main(["check", "--job", *sys.argv[2:]])
