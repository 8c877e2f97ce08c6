"""Where responses are kept from the moment they are finished until nothing could need them again: logs per rank and
step (telemetry/record_log.py), `step_00000021.rank_00003.gen.log` in the folder of the rollout archive."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_FILE_NAME = re.compile(r"step_(\d{8,})\.rank_\d+\.gen\.log")


def generation_log(folder: str | os.PathLike[str], step: int, rank: int) -> Path:
    return Path(folder) / f"step_{step:08d}.rank_{rank:05d}.gen.log"


def generation_logs(folder: str | os.PathLike[str]) -> Iterator[tuple[int, Path]]:
    """(step, path) of every such log, those of all ranks."""
    for path in sorted(Path(folder).glob("step_*.gen.log")):
        name = _FILE_NAME.fullmatch(path.name)
        if name:
            yield int(name[1]), path
