"""What every rank does with a command: send the rows it owes, gather the rows it needs, run the method, report.

A rank starts its commands in the order in which they came, and ends one before it starts the next, with one exception:
a method that takes long may attend to its desk, and then commands that wait for no other rank run inside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.busy import BusyClock, BusyReport
from hpcrl.controller.columns import (
    ColumnStore,
    Read,
    merge_rows,
    pack,
    receivers_of,
    rows_between,
    senders_of,
    unpack,
)
from hpcrl.controller.memory import MemoryLedger
from hpcrl.controller.profiler import Profiler
from hpcrl.controller.register import registration_of
from hpcrl.controller.wire import Wire, decode, encode
from hpcrl.controller.worker import Worker
from hpcrl.runtime.accelerator import annotated
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.mpi import create_group, wait, wait_time

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.grid.layout import Layout
    from hpcrl.runtime.world import World

COMMANDS, RESULTS, ROWS = 1, 2, 3  # message tags
FETCH = "fetch"
BUSY = "busy"
PROFILE = "profile"
STOP = "stop"


@dataclass(frozen=True)
class Command:
    """One entry of a rank's FIFO, as that rank gets it.

    role: the role that runs `method` here; None on a rank that only owes rows.
    destination: int32 (N,) home rank of every row, None when no batch is moved.
    samples: sample-level columns of this replica's rows.
    alone: the method runs on the replica's home only.
    writes: column that the method writes -> id of the block it becomes.
    forget: blocks that nobody can ask for any more.
    """

    id: int
    role: str | None
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: tuple[Read, ...] = ()
    destination: np.ndarray | None = None
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    alone: bool = False
    reports: bool = False
    forget: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a reporting rank sends to rank 0. row_bytes: bytes of columns it received for the command."""

    command: int
    rank: int
    value: Any
    row_bytes: int = 0


@dataclass(frozen=True)
class Note:
    """Something small that a worker tells rank 0 of its own accord."""

    rank: int
    value: Any


@dataclass(frozen=True)
class Farewell:
    """The last message of a rank: all that it sent before has come, too."""

    rank: int


@dataclass(frozen=True)
class Kept:
    """What a home reports of a batch call: the columns that it wrote stay with it, and only their names travel."""

    written: tuple[str, ...]
    samples: dict[str, np.ndarray]
    meta: dict[str, Any]


class Executor:
    """One rank's workers and columns, and their `Desk`."""

    def __init__(self, world: World, workers: Mapping[str, Worker], layouts: Mapping[str, Layout]) -> None:
        self.world = world
        self.workers = workers
        self.layouts = layouts
        self.wire = Wire(world.comm)
        self.store = ColumnStore()
        self._busy = BusyClock(wait_time)
        self._memory = MemoryLedger()
        self._profiler = Profiler(world.rank)
        self._row_bytes = 0
        self._come: deque[Command] = deque()  # received, and not yet run
        self._replicas = _replica_communicators(self.wire.comm, layouts)
        for worker in workers.values():
            worker.desk, worker.status = self, world.status

    def serve(self) -> None:
        """Run commands of rank 0 until it says stop."""
        while (command := self._next()).method != STOP:
            self._run_and_report(command)
        self.wire.send(encode(Farewell(self.wire.rank)), to=0, tag=RESULTS)

    def run(self, command: Command) -> Result | None:
        here, outer_row_bytes = self.world.status, self._row_bytes
        self._row_bytes = 0
        with here.within(command.role or "owner", command.method, command.id):
            here.step = command.meta.get("step", here.step)
            for block in command.forget:
                self.store.forget(block)
            self._send_owed_rows(command)
            value = self._execute(command) if command.role else None
        result = Result(command.id, self.wire.rank, value, self._row_bytes) if command.reports else None
        self._row_bytes = outer_row_bytes
        return result

    def attend(self) -> bool:
        """See `Desk`. Rank 0's own commands come from its program, which does not go on inside a method."""
        while self.wire.rank != 0:
            if not self._come:
                message = self.wire.receive_if_there(0, COMMANDS)
                if message is None:
                    break
                self._come.append(decode(message))
            if not self._may_run_meanwhile(self._come[0]):
                return True
            self._run_and_report(self._come.popleft())
        return False

    def tell(self, note: Any) -> None:
        self.wire.send(encode(Note(self.wire.rank, note)), to=0, tag=RESULTS)

    def post(self, key: str, text: str) -> None:
        self.world.key_value_store.set(key, text)

    def share(self, layout: Layout, value: Any) -> Any:
        dp = layout.coord(self.wire.rank).dp
        replica, home = layout.replica(dp), layout.home(dp)
        if len(replica) == 1:
            return value
        message = np.frombuffer(encode(value) if value is not None and self.wire.rank == home else b"", np.uint8)
        message = broadcast_bytes(self._replicas[replica], message, root=replica.index(home))
        return decode(message) if len(message) else None

    def close(self) -> None:
        for comm in self._replicas.values():
            comm.Free()
        self.wire.close()

    def _next(self) -> Command:
        return self._come.popleft() if self._come else decode(self.wire.receive(0, COMMANDS))

    def _run_and_report(self, command: Command) -> None:
        result = self.run(command)
        if result is not None:
            self.wire.send(encode(result), to=0, tag=RESULTS)

    def _may_run_meanwhile(self, command: Command) -> bool:
        """Whether it waits for no other rank: an owner only sends, and a home alone may need no rows of others."""
        if command.role is None:
            return command.method != STOP
        if command.role in (BUSY, PROFILE):
            return True
        method = registration_of(type(self.workers[command.role]), command.method) if command.role != FETCH else None
        if method is None or not method.meanwhile or command.destination is None:
            return False
        return not senders_of(command.reads, command.destination, self.wire.rank)

    def _execute(self, command: Command) -> Any:
        if command.role == FETCH:
            return self._gather_rows(command)
        if command.role == BUSY:
            kept = sum(worker.host_buffers() for worker in self.workers.values())
            return BusyReport(self.wire.rank, node_name(), self._busy.collect(), self._memory.collect(), kept)
        if command.role == PROFILE:
            return getattr(self._profiler, command.method)(*command.args)
        phase = f"{command.role}.{command.method}"
        with annotated(phase), self._busy.phase(phase), self._memory.phase(phase):
            return self._run_method(command)

    def _run_method(self, command: Command) -> Any:
        worker = self.workers[command.role]  # type: ignore[index]
        method = getattr(worker, command.method)
        if command.destination is None:
            return method(*command.args, **command.kwargs)
        batch = DataProto(self._replica_rows(command, worker), dict(command.samples), dict(command.meta))
        output = method(batch, *command.args, **command.kwargs)
        return self._keep(command, worker, output) if worker.is_home else None

    def _keep(self, command: Command, worker: Worker, output: Any) -> Any:
        """Store the columns a method wrote; give what goes to rank 0."""
        writes = command.writes
        if not isinstance(output, DataProto):
            if writes:
                raise TypeError(f"{command.role}.{command.method} writes {', '.join(writes)}, but returned {output!r}")
            return output
        registered = registration_of(type(self.workers[command.role]), command.method).writes  # type: ignore[index]
        required = {name for name in registered if not name.endswith("?")}
        if not required <= output.tokens.keys() <= writes.keys():
            raise ValueError(
                f"{command.role}.{command.method} is registered to write {sorted(registered)}, "
                f"but returned the columns {sorted(output.tokens)}"
            )
        for name, column in output.tokens.items():
            self.store.put(writes[name], column)  # type: ignore[arg-type]
        return Kept(tuple(sorted(output.tokens)), output.samples, output.meta_info)

    def _send_owed_rows(self, command: Command) -> None:
        if command.destination is None:
            return
        mine = self.wire.rank
        for receiver in receivers_of(command.reads, command.destination, mine):
            columns = [
                self.store.rows(read.location, rows_between(read.location, command.destination, mine, receiver))
                for read in command.reads
            ]
            self.wire.send(pack(columns), receiver, ROWS)

    def _gather_rows(self, command: Command) -> dict[str, Ragged]:
        """Every column of the command, with the rows whose destination is this rank, in batch order."""
        assert command.destination is not None
        mine, destination = self.wire.rank, command.destination
        if not command.reads:
            return {}
        received = {}
        for sender in senders_of(command.reads, destination, mine):
            message = self.wire.receive(sender, ROWS)
            self._row_bytes += message.nbytes
            received[sender] = unpack(message, len(command.reads))
        needed = np.flatnonzero(destination == mine)
        columns = {}
        for index, read in enumerate(command.reads):
            parts, positions = [], []
            for sender in np.unique(read.location.rank[needed]).tolist():
                rows = rows_between(read.location, destination, sender, mine)
                parts.append(self.store.rows(read.location, rows) if sender == mine else received[sender][index])
                positions.append(np.searchsorted(needed, rows))
            columns[read.column] = merge_rows(parts, positions)
            if read.moved_to is not None:
                self.store.put(read.moved_to, columns[read.column])
        return columns

    def _replica_rows(self, command: Command, worker: Worker) -> dict[str, Ragged | Any]:
        """The replica's rows on each of its ranks: gathered by the home, broadcast inside the replica."""
        replica = worker.layout.replica(worker.layout.coord(worker.rank).dp)
        columns = self._gather_rows(command) if worker.is_home else {}
        if command.alone or len(replica) == 1 or not command.reads:
            return columns
        comm = self._replicas[replica]
        root = replica.index(worker.layout.home(worker.layout.coord(worker.rank).dp))
        message = pack(list(columns.values())) if worker.is_home else np.zeros(0, np.uint8)
        message = broadcast_bytes(comm, message, root)
        if worker.is_home:
            return columns
        return dict(zip([read.column for read in command.reads], unpack(message, len(command.reads)), strict=True))


def broadcast_bytes(comm: MPI.Comm, message: np.ndarray, root: int) -> np.ndarray:
    size = np.array([message.nbytes], np.int64)
    wait(comm.Ibcast(size, root=root))
    message = message.copy() if comm.rank == root else np.empty(int(size[0]), np.uint8)  # MPI wants it writable
    if size[0]:
        wait(comm.Ibcast(message, root=root))
    return message


def _replica_communicators(comm: MPI.Intracomm, layouts: Mapping[str, Layout]) -> dict[tuple[int, ...], MPI.Comm]:
    """One communicator per distinct replica of several ranks that this rank is in."""
    made: dict[tuple[int, ...], MPI.Comm] = {}
    for layout in (layouts[role] for role in sorted(layouts)):
        ranks = layout.replica(layout.coord(comm.rank).dp) if comm.rank in layout else ()
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = create_group(comm, ranks)
    return made
