"""What every rank does with a command: send the rows that others need, gather its own, run the method, report.

`Wire` sends and receives the messages: commands, results and rows of columns.

A rank runs its commands one after the other, in the order in which they arrive, with one exception: a long method may
call `Executor.poll`, and then commands that wait for no other rank run inside it. Sends do not block, and their objects
are kept until they are out; receives wait with back-off.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.batch.data_proto import DataProto, LocalColumn
from hpcrl.controller.busy import BusyClock, BusyReport, MemoryLedger, Profiler
from hpcrl.controller.columns import ColumnStore, Share, merge_rows, ranks_in, receivers_of, rows_between, senders_of
from hpcrl.controller.register import Worker, registration_of
from hpcrl.runtime.accelerator import profiler_range
from hpcrl.runtime.launcher import node_name
from hpcrl.runtime.mpi import broadcast_object, create_group, duplicate, wait, wait_all, wait_for_ranks, wait_time
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.observe.trace.rank_trace import RankTrace
    from hpcrl.runtime.layout import Layout
    from hpcrl.runtime.world import World

TESTS_PER_SEND = 8


class Wire:
    """Messages on a communicator of their own, so that they cannot match those of other parts of the program."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm: MPI.Intracomm = duplicate(comm)  # type: ignore[assignment]
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.bytes_sent: Counter[int] = Counter()  # by tag
        self.bytes_received: Counter[int] = Counter()
        self._sends: deque[tuple[MPI.Request, Any]] = deque()

    def send(self, message: object, to: int, tag: int) -> int:
        """Start a send; its buffer is kept until the send has completed. Returns its bytes."""
        data = pickle.dumps(message, protocol=5)
        self._free_completed()
        self.bytes_sent[tag] += len(data)
        self._sends.append((self.comm.Isend(data, dest=to, tag=tag), data))
        return len(data)

    def receive(self, source: int | None, tag: int) -> Any:
        """Wait for the next message of `source` (None: of any rank) under `tag`.

        Messages are pickles: only ranks of this program send them.
        """
        messages: list[bytearray] = []

        def arrived() -> bool:
            messages.extend(self._received(source, tag))
            return bool(messages)

        wait_for_ranks(arrived)
        return pickle.loads(messages[0])

    def receive_if_there(self, source: int, tag: int) -> Any:
        """As `receive` if a message has arrived, otherwise None."""
        found = self._received(source, tag)
        return pickle.loads(found[0]) if found else None

    def _received(self, source: int | None, tag: int) -> list[bytearray]:
        """The next message, if one has arrived."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(source=MPI.ANY_SOURCE if source is None else source, tag=tag, status=status)
        if message is None:
            return []
        buffer = bytearray(status.Get_count(MPI.BYTE))
        wait(message.Irecv([buffer, MPI.BYTE]))
        self.bytes_received[tag] += len(buffer)
        return [buffer]

    def _free_completed(self) -> None:
        """Free buffers of completed sends. A call tests a few of them in turn, because a call for each of many ranks
        would otherwise test all sends to the ranks before."""
        for _ in range(min(len(self._sends), TESTS_PER_SEND)):
            request, held = self._sends.popleft()
            if not request.Test():
                self._sends.append((request, held))

    def flush(self) -> None:
        wait_all([request for request, _ in self._sends])
        self._sends.clear()

    def close(self) -> None:
        self.flush()
        self.comm.Free()


COMMANDS, RESULTS, ROWS = 1, 2, 3  # message tags
FETCH = "fetch"
BUSY = "busy"
PROFILE = "profile"
TRACE = "trace"
STOP = "stop"


@dataclass(frozen=True)
class Command:
    """One entry of a rank's FIFO, as that rank receives it.

    role: the role that runs `method` here; None on a rank that only sends rows.
    share: token-level columns that the method needs, and which of their rows this rank sends and receives; None without
    a batch. samples: on a leader, sample-level columns of its replica's rows. meta: the batch's meta_info, without
    metrics.
    writes: column that the method writes -> id of the block in which it is stored.
    broadcasts: the leader sends its rows, and their samples, to the other ranks of its replica.
    reports: the result goes to rank 0.
    free: blocks that no later command can refer to.
    """

    id: int
    role: str | None
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    share: Share | None = None
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    broadcasts: bool = False
    reports: bool = False
    free: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a reporting rank sends to rank 0. row_bytes: bytes of columns that it received for the command."""

    command: int
    rank: int
    value: Any
    row_bytes: int = 0


@dataclass(frozen=True)
class Notification:
    """A small object that a worker sends to rank 0 outside of results."""

    rank: int
    value: Any


@dataclass(frozen=True)
class Shutdown:
    """The last message of a rank. MPI keeps the order of messages, so all earlier ones have arrived before it."""

    rank: int


@dataclass(frozen=True)
class BatchResult:
    """The result of a method that returns a batch: the written columns stay on the leader, their names are sent."""

    written: tuple[str, ...]
    samples: dict[str, np.ndarray]
    meta: dict[str, Any]


class Executor:
    """One rank's workers and columns. As `Worker.context` it is what a method can use while it runs: `poll`,
    `notify_controller`, `publish` and `broadcast`."""

    def __init__(
        self,
        world: World,
        workers: Mapping[str, Worker],
        layouts: Mapping[str, Layout],
        trace: RankTrace | None = None,
    ) -> None:
        """Collective over the world.

        Args:
            trace: where this rank's trace is written, if the job records one.
        """
        self.world = world
        self.trace = trace
        self.workers = workers
        self.layouts = layouts
        self.wire = Wire(world.comm)
        self.store = ColumnStore()
        self._busy = BusyClock(wait_time)
        self._memory = MemoryLedger()
        self._profiler = Profiler(world.rank)
        self._received: deque[Command] = deque()  # and not yet run
        self._replicas = _replica_communicators(self.wire.comm, layouts)
        for worker in workers.values():
            worker.context, worker.status = self, world.status
        if trace is not None:
            trace.begin(self.wire.comm)

    def serve(self) -> None:
        """Run commands of rank 0 until STOP."""
        while True:
            command = self._received.popleft() if self._received else self.wire.receive(0, COMMANDS)
            if command.method == STOP:
                break
            self._run_and_report(command)
        self.wire.send(Shutdown(self.wire.rank), to=0, tag=RESULTS)

    def run(self, command: Command) -> Result | None:
        """Run this rank's part of a command; the result, if this rank reports one."""
        here, row_bytes = self.world.status, self.wire.bytes_received[ROWS]
        role = command.role or "owner"
        with here.within(role, command.method, command.id), spans.span(f"{role}.{command.method}", command=command.id):
            here.step = command.meta.get("step", here.step)
            for block in command.free:
                self.store.pop(block, None)
            self._send_rows(command)
            value = self._execute(command) if command.role else None
        if not command.reports:
            return None
        return Result(command.id, self.wire.rank, value, self.wire.bytes_received[ROWS] - row_bytes)

    def poll(self) -> bool:
        """Run received commands that may run inside the current method: those registered as `reentrant`, and sends of
        rows to other ranks. Returns True when the next command has to wait for the end of the method. Does not block.

        Nothing arrives on rank 0: its commands come from its program, which waits while the method runs.
        """
        while self.wire.rank != 0:
            if not self._received:
                command = self.wire.receive_if_there(0, COMMANDS)
                if command is None:
                    break
                self._received.append(command)
            if not self._is_reentrant(self._received[0]):
                return True
            self._run_and_report(self._received.popleft())
        return False

    def notify_controller(self, value: Any) -> None:
        """Send a small object to `Controller.listener` on rank 0. Does not block."""
        self.wire.send(Notification(self.wire.rank, value), to=0, tag=RESULTS)

    def publish(self, key: str, text: str) -> None:
        """Publish a string to rank 0 in the key-value store. Safe from any thread."""
        self.world.key_value_store.set(key, text)

    def broadcast(self, layout: Layout, value: Any) -> Any:
        """Return the leader's `value` on every rank of its replica. Collective over the replica; None is cheapest."""
        dp = layout.coord(self.wire.rank).dp
        replica, leader = layout.replica(dp), layout.leader(dp)
        if len(replica) == 1:
            return value
        return broadcast_object(self._replicas[replica], value, root=replica.index(leader))

    def close(self) -> None:
        for comm in self._replicas.values():
            comm.Free()
        self.wire.close()
        if self.trace is not None:
            self.trace.close()

    def _run_and_report(self, command: Command) -> None:
        result = self.run(command)
        if result is not None:
            self.wire.send(result, to=0, tag=RESULTS)

    def _is_reentrant(self, command: Command) -> bool:
        """Whether this rank's part of the command waits for no other rank."""
        if command.role is None:
            return command.method != STOP  # it only sends rows
        if command.role in (BUSY, PROFILE):
            return True
        method = registration_of(type(self.workers[command.role]), command.method) if command.role != FETCH else None
        if method is None or not method.reentrant or command.share is None:
            return False
        return not senders_of(command.share.reads, command.share.destinations, self.wire.rank)

    def _execute(self, command: Command) -> Any:
        if command.role == FETCH:
            return self._gather_rows(command)
        if command.role == BUSY:
            if self.trace is not None and self.wire.rank != 0:  # rank 0's program ends its steps itself
                self.trace.end_step(*command.args)
            buffers = sum(worker.host_buffers() for worker in self.workers.values())
            return BusyReport(self.wire.rank, node_name(), self._busy.collect(), self._memory.collect(), buffers)
        if command.role == PROFILE:
            return getattr(self._profiler, command.method)(*command.args)
        if command.role == TRACE:
            return self.trace.align() if self.trace is not None else None
        phase = f"{command.role}.{command.method}"
        with profiler_range(phase), self._busy.phase(phase), self._memory.phase(phase):
            return self._run_method(command)

    def _run_method(self, command: Command) -> Any:
        worker = self.workers[command.role]  # type: ignore[index]
        method = getattr(worker, command.method)
        if command.share is None:
            return method(*command.args, **command.kwargs)
        columns, samples = self._replica_rows(command, worker)
        batch = DataProto(dict(columns), dict(samples), dict(command.meta))
        output = method(batch, *command.args, **command.kwargs)
        return self._store_output(command, worker, output) if worker.is_leader else None

    def _store_output(self, command: Command, worker: Worker, output: Any) -> Any:
        """Store the columns that a method wrote; returns what goes to rank 0."""
        writes = command.writes
        if not isinstance(output, DataProto):
            if writes:
                raise TypeError(f"{command.role}.{command.method} writes {', '.join(writes)}, but returned {output!r}")
            return output
        registered = registration_of(type(worker), command.method).writes
        required = {name for name in registered if not name.endswith("?")}
        if not required <= output.tokens.keys() <= writes.keys():
            raise ValueError(
                f"{command.role}.{command.method} is registered to write {sorted(registered)}, "
                f"but returned the columns {sorted(output.tokens)}"
            )
        for name in output.tokens:
            self.store[writes[name]] = output.local(name)
        return BatchResult(tuple(sorted(output.tokens)), output.samples, output.meta_info)

    def _send_rows(self, command: Command) -> None:
        """Send the rows that other ranks need for the command and this rank has."""
        if command.share is None:
            return
        mine, reads, destination = self.wire.rank, command.share.reads, command.share.destinations
        for receiver in receivers_of(reads, destination, mine):
            columns = [
                self.store.rows(read.location, rows_between(read.location, destination, mine, receiver))
                for read in reads
            ]
            began = time.perf_counter()
            nbytes = self.wire.send(columns, receiver, ROWS)
            spans.add_transfer("columns", mine, receiver, nbytes, began, time.perf_counter())

    def _gather_rows(self, command: Command) -> dict[str, LocalColumn]:
        """Every column of the command, with the rows whose destination is this rank, in batch order."""
        assert command.share is not None
        mine, reads, destination = self.wire.rank, command.share.reads, command.share.destinations
        if not reads:
            return {}
        received = {sender: self._receive_rows(sender) for sender in senders_of(reads, destination, mine)}
        needed = np.flatnonzero(destination == mine)
        columns = {}
        for index, read in enumerate(reads):
            parts, positions = [], []
            for sender in ranks_in(read.location.rank[needed]):
                rows = rows_between(read.location, destination, sender, mine)
                parts.append(self.store.rows(read.location, rows) if sender == mine else received[sender][index])
                positions.append(np.searchsorted(needed, rows))
            columns[read.column] = merge_rows(parts, positions)
            if read.moved_to is not None:
                self.store[read.moved_to] = columns[read.column]
        return columns

    def _receive_rows(self, sender: int) -> list[LocalColumn]:
        began, before = time.perf_counter(), self.wire.bytes_received[ROWS]
        columns: list[LocalColumn] = self.wire.receive(sender, ROWS)
        nbytes = self.wire.bytes_received[ROWS] - before
        spans.add_transfer("columns", sender, self.wire.rank, nbytes, began, time.perf_counter())
        return columns

    def _replica_rows(self, command: Command, worker: Worker) -> tuple[dict[str, LocalColumn], dict[str, np.ndarray]]:
        """The replica's columns and samples on each of its ranks: the leader gathers the columns, gets the samples from
        rank 0, and broadcasts both inside the replica."""
        found = self._gather_rows(command) if worker.is_leader else {}, command.samples
        if not command.broadcasts:
            return found
        dp = worker.layout.coord(worker.rank).dp
        replica = worker.layout.replica(dp)
        root = replica.index(worker.layout.leader(dp))
        received: tuple[dict[str, LocalColumn], dict[str, np.ndarray]]
        received = broadcast_object(self._replicas[replica], found, root)
        return received


def _replica_communicators(comm: MPI.Intracomm, layouts: Mapping[str, Layout]) -> dict[tuple[int, ...], MPI.Intracomm]:
    """One communicator per distinct replica of several ranks that this rank is in."""
    made: dict[tuple[int, ...], MPI.Intracomm] = {}
    for layout in (layouts[role] for role in sorted(layouts)):
        ranks = layout.replica(layout.coord(comm.rank).dp) if comm.rank in layout else ()
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = create_group(comm, ranks)
    return made
