"""The supervisor that `task_sandbox.TaskSandbox` starts: has a task's files, and runs commands on them with limits.

Three processes for each command, and its own:

    supervisor   user, mount, network, IPC and UTS namespaces; the tmpfs with the task's files. Ends with its input.
    watcher      of one command: kills it when it exceeds a limit.
    init         process 1 of a process namespace. When it ends, the kernel kills all processes in it.
    command      as all that it starts, without privileges, with the task's view as its root.

Each has the kernel kill it when its parent ends. All mounts are in the mount namespace of these processes and end with
the last of them. Requests and replies are passed by marshal through standard input and output. It runs without
site-packages (`python -I -S`), which halves its start-up time.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import stat
import sys
import warnings  # noqa: F401  # os.execvpe imports it, from where the command may write
from collections.abc import Callable
from errno import EFBIG, EISDIR, EPERM
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import isolation, process_tree, seccomp
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.task_command import describe, watch_one
from hpcrl.sandbox.task_files import WORKSPACE, Files
from hpcrl.sandbox.watched_child import MB

HOME = "/home/agent"
HOSTNAME = b"sandbox"
SECONDS_FOR_FILES = 30.0  # to read or write one
NOT_FOUND = 127  # exit code, as that of a shell


class Supervisor:
    """Answers requests: (name of a method, arguments). limits: of `task_sandbox.Limits`, as a dict."""

    def __init__(self, files: Files, limits: dict[str, int]) -> None:
        self.files = files
        self.limits = limits

    def run(self, command: list[str], folder: str, environment: dict[str, str], stdin: bytes, seconds: float) -> tuple:
        def execute() -> NoReturn:
            try:
                os.chdir(folder)
                os.execvpe(command[0], command, environment)
            except (OSError, ValueError) as error:  # the second for a zero byte, or half a surrogate pair
                what = folder if getattr(error, "filename", None) == folder else command[0]
                why = getattr(error, "strerror", None) or error
                os.write(2, f"{what}: {why}\n".encode(errors="backslashreplace"))
                os._exit(NOT_FOUND)

        return self._apart(execute, seconds, self.limits["output_kb"] * 1024, stdin)

    def read(self, path: str, most: int) -> tuple:
        def read() -> None:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(EISDIR if stat.S_ISDIR(mode) else EPERM, "")
            with open(file, "rb") as reader, open(1, "wb") as writer:
                left = most
                while part := reader.read(min(left + 1, MB)):
                    left -= len(part)
                    if left < 0:
                        raise OSError(EFBIG, "")
                    writer.write(part)

        return self._apart(read, SECONDS_FOR_FILES, 2 * most)

    def write(self, path: str, data: bytes, mode: int) -> tuple:
        def write() -> None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            try:
                os.unlink(path)  # it may be a link, a pipe, or read-only
            except FileNotFoundError:
                pass
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode)

        return self._apart(write, SECONDS_FOR_FILES)

    def snapshot(self) -> int:
        return self.files.snapshot()

    def restore(self, mark: int) -> None:
        self.files.restore(mark)

    def drop(self, mark: int) -> None:
        self.files.written.drop(mark)

    def prepare(self) -> tuple:
        """Make what programs expect and an image may lack. Inside, because its folders may be links to anywhere."""

        def prepare() -> None:
            for folder, mode in (("/tmp", 0o1777), (HOME, 0o755), (WORKSPACE, 0o755), ("/etc", 0o755)):
                if not os.path.isdir(folder):
                    os.makedirs(folder)
                    os.chmod(folder, mode)
            for name, line in (
                ("/etc/passwd", f"agent:x:{isolation.INSIDE_UID}:{isolation.INSIDE_UID}::{HOME}:/bin/bash\n"),
                ("/etc/group", f"agent:x:{isolation.INSIDE_UID}:\n"),
            ):
                with open(name, "a+") as file:
                    file.seek(0)
                    if f":{isolation.INSIDE_UID}:" not in file.read(MB):
                        file.write(line)

        return self._apart(prepare, SECONDS_FOR_FILES)

    def _apart(self, act: Callable[[], None], seconds: float, output: int = 4096, stdin: bytes = b"") -> tuple:
        """Run `act` inside, in a process of its own, and return (excess or "", exit code, head, tail, bytes left out of
        the output). The exit code of an OSError is its number."""
        reader, writer = os.pipe()
        supervisor = os.getpid()
        watcher = os.fork()
        if watcher == 0:
            try:
                os.close(reader)
                process_tree.signal_on_parent_death(supervisor)
                reply = marshal.dumps(watch_one(act, seconds, output, stdin, self.limits))
                with open(writer, "wb") as file:
                    file.write(reply)
            finally:
                os._exit(0)
        os.close(writer)
        reply = read_all(reader)
        os.waitpid(watcher, 0)
        self.files.clear_shared_memory()
        try:
            found: tuple = marshal.loads(reply)
        except (EOFError, ValueError, TypeError):
            found = ("killed", -signal.SIGKILL, b"", b"", 0)
        return found


def read_all(pipe: int) -> bytes:
    """Read a pipe to its end. Exits if the requests end before."""
    poll = select.poll()
    poll.register(0, 0)  # its end only
    poll.register(pipe, select.POLLIN)
    found: list[bytes] = []
    with open(pipe, "rb", buffering=0) as file:
        while True:
            ready = dict(poll.poll())
            if 0 in ready:
                os._exit(0)
            if not (part := file.read(MB)):
                return b"".join(found)
            found.append(part)


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    (folder, image, squashfuse, shown, layers), limits = marshal.load(requests)
    os.umask(0o022)
    try:
        process_tree.raise_oom_score()
        seccomp.leave_keyring()
        isolation.unshare_namespaces(isolation.CLONE_NEWUTS)
        libc_call("sethostname", HOSTNAME, len(HOSTNAME))
        files = Files(folder, image, squashfuse, shown, layers, limits["disk_mb"], limits["files"])
    except OSError as error:
        marshal.dump(("failed", describe(error)), replies)
        return
    marshal.dump(("ready", type(files.written).__name__), replies)
    replies.flush()
    supervisor = Supervisor(files, limits)
    while True:
        try:
            name, *arguments = marshal.load(requests)
        except EOFError:
            return
        reply: tuple[str, Any]
        try:
            reply = "ok", getattr(supervisor, name)(*arguments)
        except OSError as error:
            reply = "failed", describe(error)
        marshal.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    main()
