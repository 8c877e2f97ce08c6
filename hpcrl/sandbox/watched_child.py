"""A child process under limits: its output, and the time, the memory and the processes that it and its descendants use.

For the supervisors of programs under test and of tasks. Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from hpcrl.sandbox import process_tree

TICK_SECONDS = 0.05  # between two checks of the number of processes and their memory
MAX_THREADS = 1024  # of all processes; the kernel's memory for these, locks and signals is in no count
RESERVED_PIDS = 300  # of a process namespace: those below are used once only
MAX_LOCKS = 10_000  # of parts of files
MAX_SIGNALS = 1024  # pending, and timers
MB = 2**20


class Output:
    """What a process has written, up to a limit that it must not exceed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        self.data += part

    @property
    def exceeds(self) -> bool:
        return len(self.data) > self.most


class OutputEnds:
    """The beginning and the end of what a process has written, half of `most` bytes each."""

    exceeds = False

    def __init__(self, most: int) -> None:
        self.half = most // 2
        self.head, self.tail = bytearray(), bytearray()
        self.left_out = 0  # bytes between the two

    def add(self, part: bytes) -> None:
        room = self.half - len(self.head)
        self.head += part[:room]
        self.tail += part[room:]
        more = max(len(self.tail) - self.half, 0)
        del self.tail[:more]
        self.left_out += more


Written = TypeVar("Written", Output, OutputEnds)


class Child(Generic[Written]):
    """A child process, with its output so far by the pipe that it comes from."""

    def __init__(self, pid: int, output: dict[int, Written]) -> None:
        self.pid = pid
        self.output: dict[int, Written] = output
        self.open = list(output)
        self.status: int | None = None
        self.cpu_seconds = 0.0
        for pipe in self.open:
            os.set_blocking(pipe, False)

    def read(self, ready: list[int]) -> None:
        for pipe in ready:
            try:
                part = os.read(pipe, 1 << 16)
            except BlockingIOError:
                continue
            self.output[pipe].add(part)
            if not part:
                self.open.remove(pipe)
                os.close(pipe)

    def reap(self) -> None:
        """Reap the child and orphans that this process has adopted."""
        for pid, status, usage in process_tree.reap():
            if pid == self.pid:
                self.status = status
                self.cpu_seconds = usage.ru_utime + usage.ru_stime


def watch(child: Child[Any], wake: int, seconds: float, processes: int, memory: Callable[[], int]) -> str | None:
    """Return None when the child has ended, or why it must be killed: "timeout", "memory", "processes", "output",
    "stopped" (by `process_tree.END`). Processes that the child leaves behind are not killed.

    Args:
        wake: reader of `process_tree.wake_on_signals`.
        memory: the bytes that all processes together may have now.
    """
    end, next_check = time.monotonic() + seconds, 0.0
    while True:
        now = time.monotonic()
        if now >= end:
            return "timeout"
        if now >= next_check:
            if (why := excess(processes, memory)) is not None:
                return why
            next_check = now + TICK_SECONDS
        ready, _, _ = select.select([wake, *child.open], [], [], min(end, next_check) - now)
        if wake in ready and process_tree.END in os.read(wake, 256):
            return "stopped"
        child.read([pipe for pipe in ready if pipe != wake])
        child.reap()
        if any(output.exceeds for output in child.output.values()):
            return "output"
        if child.status is not None:
            child.read(list(child.open))
            return None


def excess(processes: int, memory: Callable[[], int]) -> str | None:
    """What the descendants of this process have too much of, "processes" or "memory"; None: nothing."""
    alive = process_tree.descendants_of(os.getpid(), processes)
    if len(alive) > processes:  # first, because a fork bomb leaves little time
        return "processes"
    used = list(map(process_tree.usage_of, alive))
    if sum(threads for threads, _ in used) > MAX_THREADS:
        return "processes"
    most = memory()
    if sum(size for _, size in used) > most and sum(map(process_tree.proportional_bytes, alive)) > most:
        return "memory"
    return "memory" if process_tree.num_locks(alive, MAX_LOCKS) > MAX_LOCKS else None


def sealed_file(data: bytes) -> int:
    """A file in memory with these bytes, which a child can read and cannot make larger."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # it is memory
    return file


def set_limits(limits: Iterable[tuple[int, int]]) -> None:
    """Set soft and hard limits (`resource.RLIMIT_...`, value) of this process, at most what it may have."""
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def limit_threads(most: int) -> None:
    """Have the kernel limit the threads of this process namespace, as far as it can: a fork bomb that has become large
    takes the watcher's time."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if version >= (6, 14):  # before, the first of these is not the namespace's, but the machine's
        for name, value in (("pid_max", RESERVED_PIDS + most), ("ns_last_pid", RESERVED_PIDS)):
            with suppress(OSError), open(f"/proc/sys/kernel/{name}", "w") as file:
                file.write(str(value))
    if version >= (5, 14):  # before, threads of the user outside count too; without effect for root
        set_limits([(resource.RLIMIT_NPROC, most)])
