"""Tasks that an agent solves in a shell."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.rollout.environments.environment import Environment, Message, Step, Turn
from hpcrl.rollout.environments.tools import tool
from hpcrl.sandbox.task_archive import unpack
from hpcrl.sandbox.task_sandbox import Limits, TaskSandbox, probe_sandbox, require


class ShellTask(Environment):
    """A shell in a sandbox of the trajectory's own, on the files of a task.

    Entries of the row's extra_info: `task`, a folder or a tar archive with what is in /workspace at first (none: no
    file), and `test`, a command line that succeeds if the task is solved. It runs after a turn without a call; before
    it `test_files`, {path: text} or pairs of these, are written, if there are any, so that the model cannot change
    them. The reward is 1 if it succeeds, else 0. What a command leaves running, such as a server, stays for the next
    turns, and is killed before the test.

    image: a root file system, see `hpcrl.sandbox.task_sandbox.TaskSandbox`. timeout, test_timeout: seconds of a command
    and of the test.
    """

    def __init__(
        self,
        image: str = "",
        timeout: float = 30.0,
        test_timeout: float = 50.0,
        memory_mb: int = 1024,
        disk_mb: int = 256,
        processes: int = 32,
    ) -> None:
        self.image, self.timeout, self.test_timeout = image or None, timeout, test_timeout
        self.limits = Limits(memory_mb=memory_mb, disk_mb=disk_mb, processes=processes)

    @classmethod
    def check(cls) -> None:
        require(probe_sandbox())

    def reset(self, record: dict[str, Any], seed: int) -> Sequence[Message]:
        self.row = record["extra_info"]
        folder = self.row.get("task")
        if folder and os.path.isfile(folder):
            archive, folder = Path(folder), Path(tempfile.gettempdir(), "task")
            unpack(archive, folder)
        self.box = TaskSandbox(folder, self.image, self.limits)
        return []

    @tool
    def bash(self, command: str) -> str:
        """Run a command line in the task's folder.

        Args:
            command: the command line, of bash
        """
        ran = self.box.run(command, self.timeout)
        return ran.output if ran.fate == "ok" else f"{ran.output}[{ran.fate}, exit code {ran.returncode}]"

    def step(self, turn: Turn) -> Step:
        if turn.calls and not turn.is_last:
            return Step(self.call_tools(turn.calls))
        self.box.end_processes()  # they could change the test's files
        for path, text in dict(self.row.get("test_files") or {}).items():
            self.box.write(path, text.encode())
        ran = self.box.run(self.row["test"], self.test_timeout)
        return Step(done=True, reward=float(ran.fate == "ok"), info={"acc": float(ran.fate == "ok"), "test": ran.fate})

    def close(self) -> None:
        self.box.close()
