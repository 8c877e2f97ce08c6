"""A plugin for jobs under test: a rank stops in the middle of a method until something has been done to it.

HOLD_FOLDER holds one file per place, `<step>.<method>` or `<step>.<method>.<split>`, whose text is the number of the
rank that is to be held there. The rank puts `held.<pid>` into it, once, and goes on when the file `go` is there or a
signal has reached the job.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hpcrl.controller.executor import Command, Executor

FOLDER = Path(os.environ["HOLD_FOLDER"])
_execute = Executor._execute


def execute(self: Executor, command: Command) -> Any:
    step = command.meta.get("step", "any")
    for name in (f"{step}.{command.method}", f"{step}.{command.method}.{command.meta.get('split')}"):
        place = FOLDER / name
        if place.is_file() and place.read_text() == str(self.world.rank):
            hold(self, place)
    return _execute(self, command)


def hold(executor: Executor, place: Path) -> None:
    draft = place.with_suffix(".draft")
    draft.write_text(f"held.{os.getpid()}")
    os.replace(draft, place)
    while not (FOLDER / "go").exists():
        if executor.world.stop is not None and executor.world.stop.found() is not None:
            return
        time.sleep(0.01)


Executor._execute = execute  # type: ignore[method-assign]
