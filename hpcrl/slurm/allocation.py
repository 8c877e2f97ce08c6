"""Whether an allocation is long enough."""

from __future__ import annotations

import json
from pathlib import Path

from hpcrl.config.schema import JobConfig
from hpcrl.runtime.exits import InputError

MARGIN = 1.2  # nodes differ, and a shared file system has bad hours
TIMES = "times.json"  # written by a run's first slice into its folder


def check_slice(job: JobConfig, run_dir: Path) -> None:
    """InputError when a slice cannot make progress: its end must lie behind set-up, one step and one save.

    The three are known once the run's first slice has measured them.
    """
    length = job.time_seconds
    if length <= job.signal_seconds:
        raise InputError(
            f"job.time={job.time} is {length} s, and job.signal_seconds={job.signal_seconds} ends a slice that long "
            "before its end; use a longer job.time or a smaller job.signal_seconds"
        )
    try:
        measured = json.loads((run_dir / TIMES).read_text(encoding="utf-8"))
        parts = {name: float(measured[f"{name}_s"]) for name in ("setup", "step", "save")}
    except (OSError, ValueError, KeyError, TypeError):
        return
    needed = MARGIN * sum(parts.values())
    if needed > length:
        said = " + ".join(f"{name} {value:.0f} s" for name, value in parts.items())
        raise InputError(
            f"job.time={job.time} is {length} s, and a slice of {run_dir.name} needs {needed:.0f} s to get anywhere "
            f"({said}, and a fifth more); use a longer job.time"
        )
