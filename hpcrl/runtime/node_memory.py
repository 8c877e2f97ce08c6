"""A run's folder in memory of each node, for snapshots, and the copy of its files on the next node.

`<parent>/hpcrl_<uid>_<digest of the run's folder>/` is for the user only. Its file `lock` is locked while the job runs
and holds the id of the Slurm job, which may start the ranks again inside its allocation.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import xxhash

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.key_value_store import LENGTH, RankListener, connect, pack
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.mpi import all_gather_object
from hpcrl.runtime.store import listening_host
from hpcrl.sandbox.foreign_files import open_file

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)

LOCK = "lock"
GENERATIONS = 2  # of snapshots: one is complete while the other is overwritten
CHUNK = 1 << 19  # bytes that are sent while the processor's cache still has them from hashing


def folder_in(parent: str, run: Path) -> Path:
    """Folder of a run, whose own folder is `run`, in memory of a node."""
    digest = hashlib.blake2b(os.fsencode(run), digest_size=8).hexdigest()
    return Path(parent) / f"hpcrl_{os.geteuid()}_{digest}"


def next_ranks(nodes: Sequence[Any]) -> list[int | None]:
    """For each rank the one on the next node that stores copies of its files; None if all ranks are on one node.

    The nodes form a ring, in the order of their lowest ranks.

    Args:
        nodes: the node of each rank.
    """
    members: dict[Any, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    if len(members) == 1:
        return [None] * len(nodes)
    ring = list(members.values())
    next_of: dict[int, int] = {}
    for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
        next_of |= {rank: there[place % len(there)] for place, rank in enumerate(here)}
    return [next_of[rank] for rank in range(len(nodes))]


@dataclass
class NodeMemory:
    """A rank's view of the run's folders.

    nodes: of each rank. free: bytes by node, of the file system and of memory, once the models are built. next_node:
    connection to the rank that stores copies; None if all ranks are on one node.
    """

    folder: Path
    nodes: list[str]
    free: dict[str, int]
    next_node: socket.socket | None
    lock: int | None  # descriptor, on the lowest rank of each node
    keeps: bool = False  # whether the folder stays when the job ends
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, comm: MPI.Intracomm, folder: Path, one_host: bool) -> NodeMemory | str:
        """Make the folder anew on each node, and connect each node to the next. Nothing listens any more when all are
        connected. Collective.

        Returns one line if the folder cannot be made on some node.
        """
        nodes = all_gather_object(comm, node_name())
        destinations, is_first = next_ranks(nodes), nodes.index(nodes[comm.rank]) == comm.rank
        lock = listener = problem = None
        free = 0
        try:
            if is_first:
                lock = _make(folder)
                free = min(shutil.disk_usage(folder.parent).free, psutil.virtual_memory().available)
            if senders := destinations.count(comm.rank):
                listener = RankListener(listening_host(one_host), senders, comm.rank)
        except (OSError, InputError) as error:
            problem = f"{folder} on {nodes[comm.rank]}: {getattr(error, 'strerror', None) or error}"
        door = None if listener is None else (listener.address, listener.secret)
        reports = all_gather_object(comm, (problem, free, door))
        if first := next((text for text, _, _ in reports if text), None):
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return str(first)
        if listener is not None:
            threading.Thread(target=_accept, args=(listener, folder), name="snapshot copies", daemon=True).start()
        destination = destinations[comm.rank]
        next_node = None if destination is None else connect(*reports[destination][2])
        if next_node is not None:
            next_node.settimeout(None)
        return cls(folder, nodes, {node: reports[nodes.index(node)][1] for node in nodes}, next_node, lock)

    def copy(self, name: str, descriptor: int, content: memoryview | bytes | mmap.mmap) -> str:
        """Copy a file of this rank's folder to the next node, and return its xxh3_128. Safe from any thread; raises
        OSError. The file does not change meanwhile."""
        digest, view = xxhash.xxh3_128(), memoryview(content)
        with self._sending:
            self._ask({"path": name, "bytes": len(view)})
            for start in range(0, len(view), CHUNK):
                digest.update(view[start : start + CHUNK])
                self._send(descriptor, start, min(start + CHUNK, len(view)))
            self._ask(None)
        return digest.hexdigest()

    def _ask(self, header: dict[str, Any] | None) -> None:
        """Send a header, if there is one, and wait for the answer: None, or a problem."""
        if self.next_node is None:
            return
        if header is not None:
            self.next_node.sendall(pack(header))
        if problem := _message(self.next_node):
            raise OSError(errno.EIO, str(problem))

    def _send(self, descriptor: int, start: int, end: int) -> None:
        while self.next_node is not None and start < end:
            start += os.sendfile(self.next_node.fileno(), descriptor, start, end - start)

    def close(self) -> None:
        """Remove this node's folder, on its lowest rank, unless it is kept."""
        if self.lock is not None and not self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Raise OSError unless this is a folder of the user, for the user only."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not a folder of this user only; remove it", str(folder))


def _make(folder: Path) -> int:
    """Make an empty folder in the place of an earlier attempt's, and return the descriptor of its lock."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_others(folder)
    with suppress(FileNotFoundError):
        check_folder(folder)
        shutil.rmtree(folder)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir(mode=0o700)
    lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.write(lock, os.environ.get("SLURM_JOB_ID", "").encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    draft.rename(folder)
    return lock


def _remove_others(folder: Path) -> None:
    """Remove folders of other runs of the user, if their job is over."""
    for other in folder.parent.glob(f"hpcrl_{os.geteuid()}_*"):
        with suppress(OSError):
            check_folder(other)
            if other != folder and _is_over(other):
                shutil.rmtree(other)
                log.info("removed %s on %s: snapshots of an ended job", other, node_name())


def _is_over(folder: Path) -> bool:
    """Whether the job of a folder has ended, and is not this Slurm job, which may start its ranks again."""
    with open_file(folder / LOCK, folder, links=False) as lock:
        job = lock.read(64).decode(errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return not job or job != os.environ.get("SLURM_JOB_ID")


def _accept(listener: RankListener, folder: Path) -> None:
    for connection in listener.accept():
        connection.setblocking(True)
        threading.Thread(target=_serve, args=(connection, folder), name="snapshot copies", daemon=True).start()


def _serve(connection: socket.socket, folder: Path) -> None:
    """Write the files that a rank of the node before sends, until it ends."""
    files: dict[str, mmap.mmap | bytearray] = {}
    with connection, suppress(ConnectionError):
        while True:
            header = _message(connection)
            path, size = folder / header["path"], header["bytes"]
            try:
                if str(path) not in files or len(files[str(path)]) != size:
                    files[str(path)] = _new_map(path, size)
            except OSError as error:
                connection.sendall(pack(f"{path} on {node_name()}: {error.strerror}"))
                continue
            connection.sendall(pack(None))
            _fill(connection, memoryview(files[str(path)]))
            connection.sendall(pack(None))


def _new_map(path: Path, size: int) -> mmap.mmap | bytearray:
    """A new file of this size, whose memory is reserved: a write to memory that is not there would kill the rank."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not size:
            return bytearray()
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _message(connection: socket.socket) -> Any:
    length = bytearray(LENGTH.size)
    _fill(connection, memoryview(length))
    text = bytearray(LENGTH.unpack(length)[0])
    _fill(connection, memoryview(text))
    return json.loads(text)


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as `view` has. Raises ConnectionError if the other rank has ended."""
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionError(errno.ECONNRESET, "the rank on the other node has ended")
        view = view[count:]
