"""A plugin for jobs under test: rank 0 notes who it is whenever it writes metrics or commits a checkpoint.

OWNER_LOG gets a line for each write, `<number of the owner> <seconds that it waited for the folder>`, of all jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from hpcrl.engine.checkpoint.store import CheckpointStore
from hpcrl.observe.record.writer import MetricsWriter
from hpcrl.runtime import run_owner


def noted(write: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(write)
    def note_and_write(*arguments: Any, **named: Any) -> Any:
        with open(os.environ["OWNER_LOG"], "a") as file:
            file.write(f"{run_owner.number()} {run_owner.seconds_waited():.3f}\n")
        return write(*arguments, **named)

    return note_and_write


MetricsWriter._write_lines = noted(MetricsWriter._write_lines)  # type: ignore[method-assign]
CheckpointStore.commit = noted(CheckpointStore.commit)  # type: ignore[method-assign]
