"""The supervisor that `task_sandbox.TaskSandbox` starts: has a task's files, and runs commands on them with limits.

Its own process, and three for a command:

    supervisor   user, mount, network, IPC and UTS namespaces; the tmpfs with the task's files. Ends with its input.
    watcher      kills commands that exceed a limit. It stays as long as a command has left processes running.
    init         process 1 of a process namespace. When it ends, the kernel kills all processes in it.
    command      as all that it starts, without privileges, with the task's view as its root.

Files are read and written by a watcher, an init and a process of their own, which commands cannot reach.

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
from functools import partial
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import isolation, process_tree, seccomp
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.task_command import Session, describe
from hpcrl.sandbox.task_files import WORKSPACE, Files
from hpcrl.sandbox.watched_child import MB

HOME = "/home/agent"
HOSTNAME = b"sandbox"
SECONDS_FOR_FILES = 30.0  # to read or write one
NOT_FOUND = 127  # exit code, as that of a shell
KILLED = ("killed", -signal.SIGKILL, b"", b"", 0), False  # a reply

Serve = Callable[[Session, BinaryIO, BinaryIO], None]


class Watcher:
    """A process that has a `Session`.

    A reply is what `Session.run` returns, and whether processes are left running; or None if nothing was run.

    Args:
        serve: called in the process, with the ends of the pipes for requests and replies.
    """

    def __init__(self, limits: dict[str, int], serve: Serve) -> None:
        (requests, request_writer), (reply_reader, replies) = os.pipe(), os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for pipe in (request_writer, reply_reader):
                    os.close(pipe)
                process_tree.signal_on_parent_death(supervisor)
                session = Session(limits)
                serve(session, open(requests, "rb"), open(replies, "wb", buffering=0))
                session.end()
            finally:
                os._exit(0)
        for pipe in (requests, replies):
            os.close(pipe)
        self._requests, self._replies = open(request_writer, "wb", buffering=0), open(reply_reader, "rb")

    def request(self, *request: Any) -> Any:
        """Return the reply: None if the process has ended, KILLED if it ends before it replies. Exits if this process's
        input ends."""
        poll = select.poll()
        poll.register(0, 0)  # its end only
        poll.register(self._replies, select.POLLIN)
        try:
            if request:
                write_all(self._requests, marshal.dumps(request))
            if 0 in dict(poll.poll()):
                os._exit(0)
            return marshal.load(self._replies)
        except BrokenPipeError:
            return None
        except (EOFError, ValueError, TypeError):
            return KILLED

    def end(self) -> None:
        """End it by the end of its requests, and wait for that."""
        for pipe in (self._requests, self._replies):
            pipe.close()
        os.waitpid(self.pid, 0)


class Supervisor:
    """Answers requests: (name of a method, arguments).

    Args:
        limits: those of `task_sandbox.Limits`, as a dict.
    """

    def __init__(self, files: Files, limits: dict[str, int]) -> None:
        self.files = files
        self.limits = limits
        self._watcher: Watcher | None = None  # of commands
        self._are_left = False  # they have left processes running

    def run(self, *request: Any) -> tuple:
        """Run a command. Returns (excess or "", exit code, head, tail, bytes left out of the output).

        Args:
            request: command, folder, environment, stdin, seconds.
        """
        reply = None if self._watcher is None else self._watcher.request(*request)
        if reply is None:
            self.end_processes()
            self._watcher = Watcher(self.limits, self._serve)
            reply = self._watcher.request(*request)
        result, self._are_left = reply or KILLED
        return result

    def settle(self) -> None:
        """Call it after the reply to a request, because it takes as long as a short command."""
        if not self._are_left:
            self.end_processes()

    def end_processes(self) -> None:
        """End all that commands have left running, as a machine that starts: files in /dev/shm end too."""
        if self._watcher is not None:
            self._watcher.end()
            self._watcher, self._are_left = None, False
            self.files.clear_shared_memory()

    def _serve(self, session: Session, requests: BinaryIO, replies: BinaryIO) -> None:
        """In a watcher: run commands until the requests end, or a limit has ended the processes that were left."""
        are_left = True
        while are_left:
            session.wait(requests.fileno())
            if session.is_over:
                write_all(replies, marshal.dumps(None))
                return
            try:
                command, folder, environment, stdin, seconds = marshal.load(requests)
            except EOFError:
                return
            execute = partial(self._execute, command, folder, environment)
            result = session.run(execute, seconds, self.limits["output_kb"] * 1024, stdin)
            are_left = session.has_processes
            write_all(replies, marshal.dumps((result, are_left)))

    @staticmethod
    def _execute(command: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
        try:
            os.chdir(folder)
            os.execvpe(command[0], command, environment)
        except (OSError, ValueError) as error:  # the second for a zero byte, or half a surrogate pair
            what = folder if getattr(error, "filename", None) == folder else command[0]
            why = getattr(error, "strerror", None) or error
            os.write(2, f"{what}: {why}\n".encode(errors="backslashreplace"))
            os._exit(NOT_FOUND)

    def read(self, path: str, most: int) -> tuple:
        def read() -> None:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(EISDIR if stat.S_ISDIR(mode) else EPERM, "")
            with open(file, "rb") as reader, open(1, "wb") as writer:
                room = most
                while part := reader.read(min(room + 1, MB)):
                    room -= len(part)
                    if room < 0:
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
        self.end_processes()  # they would write to files that are kept
        return self.files.snapshot()

    def restore(self, mark: int) -> None:
        self.end_processes()
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

    def _apart(self, act: Callable[[], None], seconds: float, output: int = 4096) -> tuple:
        """Run `act` inside, where no command reaches it, and return what `run` does. The exit code of an OSError is its
        number."""

        def serve(session: Session, _: BinaryIO, replies: BinaryIO) -> None:
            write_all(replies, marshal.dumps((session.run(act, seconds, output, b""), False)))

        watcher = Watcher(self.limits, serve)
        result, _ = watcher.request()
        watcher.end()
        return result


def write_all(pipe: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


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
        supervisor.settle()


if __name__ == "__main__":
    main()
