"""`hpcrl check --job` on two nodes of two ranks each, with something wrong; started by tests under mpiexec."""

from __future__ import annotations

import functools
import os
import sys
import time
from importlib import metadata

from hpcrl import cli
from hpcrl.machine import check_job

WRONG = sys.argv[1]
RANK = int(os.environ["PMI_RANK"])
os.environ["SLURMD_NODENAME"] = f"n{RANK // 2}"
check_job.see_canary = functools.partial(check_job.see_canary, timeout=1.0)
version = metadata.version


def another_version(name: str) -> str:
    return "2.6.0" if name == "torch" else version(name)


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
