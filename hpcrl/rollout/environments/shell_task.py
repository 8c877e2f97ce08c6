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
    turns, and is killed before the test. The test's shell reads no start-up files, which the model could have written.
    If a file of the test cannot be written, such as in the place of a folder, the reward is 0.

    Args:
        image: a root file system, see `hpcrl.sandbox.task_sandbox.TaskSandbox`.
        timeout, test_timeout: seconds of a command and of the test.
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
        result = self._run_test()
        score = float(result == "ok")
        return Step(done=True, reward=score, info={"acc": score, "test": result})

    def _run_test(self) -> str:
        """Return how the test ended, or why a file of it cannot be written."""
        # The loader would put the libraries that this file names into each program of the test.
        for path, text in {"/etc/ld.so.preload": "", **dict(self.row.get("test_files") or {})}.items():
            try:
                self.box.write(path, text.encode())
            except OSError as error:
                if error.filename is None:  # the supervisor's error, which no file of the model causes
                    raise
                return f"{path}: {error.strerror}"
        return self.box.run(["bash", "--noprofile", "--norc", "-c", self.row["test"]], self.test_timeout).fate

    def close(self) -> None:
        self.box.close()
