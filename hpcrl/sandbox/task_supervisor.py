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
import re
import resource
import select
import signal
import socket
import stat
import sys
import time
import warnings  # noqa: F401  # os.execvpe imports it, from where the command may write
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG, EISDIR, EPERM
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.sandbox import isolation, mounts, process_tree, seccomp
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.watched_child import MAX_SIGNALS, MB, Child, OutputEnds, sealed_file, set_limits, watch
from hpcrl.sandbox.writable_files import Copies, Layers, has_layers, remove

TMPFS = isolation.ROOT
VIEW = f"{TMPFS}/view"
WORKSPACE, HOME = "/workspace", "/home/agent"
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: mapped, it is memory that no process shows
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
OWNED = "copy the folder, or make the squashfs with mksquashfs -force-uid 1000 -force-gid 1000"
HOSTNAME = "sandbox"
FILES_OF_LAYER = 16  # at most
BYTES_PER_FILE = 1024  # of the kernel's memory
MAX_OPEN_FILES = 1024  # of each process
THREADS_PER_PROCESS = 4  # of the limit
RESERVED_PIDS = 300  # are not used again
STACK_MB = 8  # of each thread
SECONDS_FOR_FILES = 30.0  # to read or write one
NOT_FOUND, NOT_SET_UP = 127, 126  # exit codes, the first as that of a shell
PYTHONS_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
PR_SET_DUMPABLE = 4


class Files:
    """The task's view of files: below `VIEW` in this mount namespace, and the root of its commands.

    folder: what is in /workspace at first. image: a folder with the root, or a squashfs file with it; "": the system's
    programs, `shown`, which are read-only. squashfuse: a program. layers: False to copy even where the kernel has them.
    """

    def __init__(
        self, folder: str, image: str, squashfuse: str, shown: list[str], layers: bool, disk_mb: int, num_files: int
    ) -> None:
        mounts.unshare()
        given = {name: os.open(path, os.O_PATH) for name, path in (("folder", folder), ("image", image)) if path}
        devices = {name: os.open(name, os.O_PATH) for name in DEVICES}
        sources = {place: os.open(place, os.O_PATH) for place in shown}  # all before a mount covers `TMPFS`
        mounts.mount_memory(TMPFS, disk_mb, num_files)
        os.chdir(TMPFS)
        for name in ("image", "folder", "view", "dev", "dev/shm", "shm", "removed"):
            os.mkdir(name)
        os.chmod("shm", 0o1777)
        if os.path.isfile(f"/proc/self/fd/{given.get('image')}"):
            mount_squashfs(squashfuse, given.pop("image"), f"{TMPFS}/image")
        mounts.show({f"/{name}": source for name, source in given.items()}, TMPFS)
        if image and os.stat("image").st_uid != isolation.INSIDE_UID:
            raise OSError("its files would belong to another user, and could not be changed: " + OWNED)
        for name, source in devices.items():
            mounts.bind_mount(f"/proc/self/fd/{source}", TMPFS, name)
        for name, target in DEVICE_LINKS.items():
            os.symlink(target, f"dev/{name}")
        self._shown = sources | {"/dev": os.open("dev", os.O_PATH)}
        start = {"": "image"} | ({WORKSPACE: "folder"} if folder else {})
        if layers and has_layers():
            self.written: Layers | Copies = Layers(start)
        elif image:
            raise OSError("the kernel has no overlayfs for users over a tmpfs (Linux 6.6), which an image needs")
        else:
            self.written = Copies(start)
        self._places = list(start)
        self._num_files = num_files
        self.mount()

    def mount(self) -> None:
        """Mount the view. Raises OSError, also if there is a link in the place of a folder."""
        root, *others = self._places
        self.written.mount(root, VIEW)
        mounts.show(self._shown, VIEW)
        mounts.bind_mount(f"{TMPFS}/shm", VIEW, "/dev/shm")
        for place in others:
            self.written.mount(place, VIEW)

    def snapshot(self) -> int:
        with self._mounted_anew():
            self.written.snapshot()
        return self.written.num_marks - 1

    def restore(self, mark: int) -> None:
        with self._mounted_anew():
            self.written.restore(mark)

    @contextmanager
    def _mounted_anew(self) -> Iterator[None]:
        mounts.detach(VIEW)
        self._num_files += FILES_OF_LAYER  # a task that has used up its own can have snapshots, and return to one
        mounts.allow_files(TMPFS, self._num_files)
        try:
            yield
        finally:
            try:
                self.mount()
            except OSError:
                os._exit(1)  # no command must run in a part of the view

    def clear_shared_memory(self) -> None:
        """Remove the files in /dev/shm, as a machine that starts."""
        for entry in os.scandir("shm"):
            remove(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def mount_squashfs(squashfuse: str, image: int, target: str) -> None:
    """Mount a squashfs file. The process that serves it ends with this one. Raises OSError."""
    supervisor, before = os.getpid(), os.stat(target).st_dev
    server = os.fork()
    if server == 0:
        try:
            process_tree.signal_on_parent_death(supervisor)
            os.set_inheritable(image, True)
            isolation.keep_only_mounting()
            os.dup2(2, 1)  # the supervisor's replies
            os.execv(squashfuse, [squashfuse, "-f", f"/proc/self/fd/{image}", target])
        finally:
            os._exit(NOT_FOUND)
    give_up = time.monotonic() + SECONDS_FOR_FILES
    while os.stat(target).st_dev == before:
        if os.waitpid(server, os.WNOHANG)[0] or time.monotonic() > give_up:
            raise OSError("squashfuse does not mount the image: not a squashfs file, or no /dev/fuse for this user")
        time.sleep(0.01)


def memory_in_files() -> int:
    """Bytes that the files in the tmpfs take."""
    found = os.statvfs(TMPFS)
    return (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * BYTES_PER_FILE


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
            except OSError as error:
                what = folder if error.filename == folder else command[0]
                os.write(2, f"{what}: {error.strerror}\n".encode(errors="surrogateescape"))
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


def watch_one(act: Callable[[], None], seconds: float, output: int, stdin: bytes, limits: dict[str, int]) -> tuple:
    """Run `act` in a process namespace of its own; see `Supervisor._apart`."""
    wake, _ = process_tree.wake_on_signals()
    libc_call("unshare", isolation.CLONE_NEWPID)
    given = sealed_file(stdin)
    printed, print_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for number, file in enumerate((given, print_writer, print_writer)):
                os.dup2(file, number)
            os.closerange(3, 1 << 16)
            become_init(limits)
        except BaseException as error:
            os.write(2, f"the sandbox cannot be set up: {error}\n".encode())
            os._exit(NOT_SET_UP)
        run_and_reap(act)
    for file in (given, print_writer):
        os.close(file)
    ends = OutputEnds(output)
    child = Child(pid, {printed: ends})

    def memory() -> int:
        return limits["memory_mb"] * MB - memory_in_files() - process_tree.socket_bytes()

    # init is one more process
    excess = watch(child, wake, seconds, limits["processes"] + 1, memory)
    if excess:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # until the kernel has killed all others
        child.read(list(child.open))
        code = -signal.SIGKILL
    else:
        code = os.waitstatus_to_exitcode(child.status or 0)
    return excess or ("killed" if code < 0 else ""), code, bytes(ends.head), bytes(ends.tail), ends.left_out


def become_init(limits: dict[str, int]) -> None:
    """Give up what a command must not have; the command inherits the rest."""
    libc_call("prctl", process_tree.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poll = select.poll()
    poll.register(1, 0)
    if poll.poll(0):  # the watcher, whose process id cannot be seen from here, has ended before
        os._exit(NOT_SET_UP)
    limit_threads(THREADS_PER_PROCESS * limits["processes"])
    mounts.unshare()
    mounts.mount_proc(VIEW)
    mounts.change_root(VIEW)
    isolation.give_up_privileges()
    set_limits(
        (
            # not RLIMIT_AS: some languages' heaps reserve more than they use
            (resource.RLIMIT_DATA, limits["memory_mb"] * MB),
            (resource.RLIMIT_STACK, STACK_MB * MB),
            (resource.RLIMIT_FSIZE, limits["disk_mb"] * MB),
            (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
            (resource.RLIMIT_SIGPENDING, MAX_SIGNALS),
            (resource.RLIMIT_CORE, 0),
        )
    )
    os.umask(0o022)
    seccomp.install()
    # /proc/1 would show the memory of the supervisor, which this process is a fork of
    libc_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_threads(most: int) -> None:
    """Have the kernel limit the threads of this process namespace, as far as it can: a fork bomb that has become large
    takes the watcher's time."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if version >= (6, 14):  # before, this is not the namespace's, but the machine's
        with suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(RESERVED_PIDS + most))
    if version >= (5, 14):  # before, threads of the user outside count too; without effect for root
        set_limits([(resource.RLIMIT_NPROC, most)])


def run_and_reap(act: Callable[[], None]) -> NoReturn:
    """Run `act` in a child, reap all processes that end, and exit with the child's code, 128 + n for a signal n."""
    main = os.fork()
    if main == 0:
        code = 1
        try:
            os.setsid()
            for signum in (*PYTHONS_SIGNALS, signal.SIGCHLD, process_tree.END, *process_tree.STOP_SIGNALS):
                signal.signal(signum, signal.SIG_DFL)
            act()
            code = 0
        except OSError as error:
            os.write(2, describe(error).encode(errors="surrogateescape"))
            code = error.errno or 1
        finally:
            os._exit(code)
    while True:
        pid, status = os.wait()
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    (folder, image, squashfuse, shown, layers), limits = marshal.load(requests)
    os.umask(0o022)
    try:
        process_tree.raise_oom_score()
        seccomp.leave_keyring()
        isolation.unshare_namespaces(isolation.CLONE_NEWUTS)
        socket.sethostname(HOSTNAME)
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


def describe(error: OSError) -> str:
    if error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


if __name__ == "__main__":
    main()
