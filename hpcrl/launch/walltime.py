"""When the allocation ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import datetime

PATIENCE = 20.0  # seconds for a busy slurmctld to answer


def end_of_allocation(environ: Mapping[str, str]) -> float | None:
    """Seconds since the epoch; None where no batch system says. May start a process, so it is for before MPI.

    HPCRL_END_TIME is what the templates export, because compute nodes may lack squeue; newer versions of Slurm have a
    variable of their own.
    """
    for name in ("HPCRL_END_TIME", "SLURM_JOB_END_TIME"):
        if environ.get(name, "").isdigit():
            return float(environ[name])
    return _ask_slurm(environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environ else None


def _ask_slurm(job: str) -> float | None:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout.strip()
        return datetime.fromisoformat(said).timestamp()  # of this machine's time zone, as squeue's own
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
