"""The controller on rank 0: issues commands, returns futures, keeps the metadata of batches.

Why no order of `get()` can deadlock:

1. Rank 0 numbers the commands in the order in which it issues them.
2. Each rank runs its part of command k after its parts of all earlier commands.
3. Sends do not block. A part of command k waits only for parts of k on other ranks.
4. `get()` first runs rank 0's own parts, in order, up to the command whose result it returns.

So the unfinished command with the lowest number can always proceed.

A long method may run later commands inside itself (`Executor.poll`). These are only commands that wait for no
other rank, in the order of their numbers. They always finish, so the method proceeds as if they took no time. A method
that ends when another command arrives waits for rank 0's next call. No call may wait for such a method, so it is an
order without a result (`Dispatch.ORDER_ALL`).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hpcrl.batch.data_proto import Columns, DataProto, LocalColumn
from hpcrl.batch.packing import balanced_assignment
from hpcrl.controller.busy import BusyReport
from hpcrl.controller.columns import Block, Location, PlacedColumn, Read, Shares, ranks_in, rows_of_each
from hpcrl.controller.executor import (
    BUSY,
    COMMANDS,
    FETCH,
    PROFILE,
    RESULTS,
    STOP,
    TRACE,
    BatchResult,
    Command,
    Executor,
    Notification,
    Result,
    Shutdown,
)
from hpcrl.controller.register import Registration, Worker, registration_of
from hpcrl.runtime.accelerator import annotated
from hpcrl.runtime.layout import Layout

if TYPE_CHECKING:
    from hpcrl.observe.trace.rank_trace import RankTrace
    from hpcrl.runtime.world import World

T = TypeVar("T")


def replica_column(dp: int) -> str:
    """Name of the sample-level column that assigns rows to one of `dp` replicas."""
    return f"replica_of_{dp}"


class Future(Generic[T]):
    """The result of a call, which may not have run yet."""

    def __init__(self, finish: Callable[[], T], is_ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._is_ready = is_ready
        self._value: T

    @property
    def is_ready(self) -> bool:
        """Whether all results have arrived, so that `get` would not wait."""
        return self._finish is None or self._is_ready()

    def get(self) -> T:
        """Wait for the result. Futures may be got in any order."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value


class WorkerGroup:
    """A role as rank 0 sees it: every registered method of its worker class is a method here, and returns a Future."""

    def __init__(self, controller: Controller, role: str, worker: type[Worker], layout: Layout) -> None:
        self._controller = controller
        self.role = role
        self.worker = worker
        self.layout = layout

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        registration = registration_of(self.worker, method)

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            return self._controller.call(self, method, registration, args, kwargs)

        return call


class Controller:
    """Runs on rank 0. `groups[role]` are the callable roles.

    listener: called with (rank, value) for every `Executor.notify_controller`. background: called repeatedly while
    rank 0 waits for a result. Both may issue commands and get futures that are ready; neither may wait.
    """

    listener: Callable[[int, Any], None] | None = None
    background: Callable[[], None] | None = None

    def __init__(self, executor: Executor, workers: Mapping[str, type[Worker]]) -> None:
        self.groups = {
            role: WorkerGroup(self, role, workers[role], layout) for role, layout in executor.layouts.items()
        }
        self._executor = executor
        self._wire = executor.wire
        self._column_bytes: Counter[str] = Counter()  # by method
        self._next_id = 0
        self._own: deque[Command] = deque()
        self._results: dict[int, dict[int, Result]] = defaultdict(dict)
        self._stopped: set[int] = set()
        self._unreferenced: dict[int, list[int]] = defaultdict(list)  # rank -> blocks that it can free

    @property
    def world_size(self) -> int:
        return self._wire.size

    def __getitem__(self, role: str) -> WorkerGroup:
        return self.groups[role]

    def close_workers(self) -> None:
        """Call `close` of every role whose workers have one, and wait: they end processes of their own."""
        for future in [group.close() for group in self.groups.values() if hasattr(group.worker, "close")]:
            future.get()

    def call(
        self, group: WorkerGroup, method: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Issue a method to the ranks of a role; the future collects what they report."""
        mode, layout = registration.mode, group.layout
        collect: Callable[[list[Any]], Any] = list
        reporters = tuple(mode.reporters(layout))
        reporting = frozenset(reporters)
        batch, plan = DataProto(), None
        if mode.takes_batch:
            batch, args = args[0], args[1:]
            plan = self._plan(group, method, registration, batch)
            if mode.returns_batch:
                collect = self._collector(plan)
        ranks = layout.leaders if registration.leader_only else layout.ranks
        call = _Call(self._number(), method, reporters, runs_here=self._wire.rank in ranks)
        parts = plan.parts(batch, layout, registration) if plan is not None else None
        for rank in ranks:
            part = parts(rank) if parts is not None else {}
            self._issue(rank, Command(call.id, group.role, method, args, kwargs, reports=rank in reporting, **part))
        if plan is not None:
            self._issue_to_owners(call.id, plan, set(ranks))
        return Future(lambda: collect(self._wait_for(call)), lambda: self._is_complete(call))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report rank 0 as being in that phase of its program."""
        with self._executor.world.status.within("controller", name), annotated(f"controller.{name}"):
            yield

    def listen(self) -> None:
        """Wait for a result or a notification."""
        if self._own:
            self._run_own()
        else:
            self._receive_result()

    def fetch(self, column: PlacedColumn) -> LocalColumn:
        """Bring a column to rank 0."""
        read = Read("fetched", column.locations[0])
        plan = _Plan((read,), np.zeros(len(column), np.int32))
        call = _Call(self._number(), FETCH, (0,), runs_here=True)
        self._issue(0, Command(call.id, FETCH, FETCH, share=plan.shares.of(0), reports=True))
        self._issue_to_owners(call.id, plan, {0})
        (columns,) = self._wait_for(call)
        return columns[read.column]

    def collect_traffic(self) -> dict[str, float]:
        """Bytes since the last call.

        controller_bytes_*: rank 0's control messages, commands out and results in. rank_0_bytes_*: all its messages,
        with columns that it owns or needs. bytes/<method>: columns that leaders received from one another; every leader
        that reads a batch reports, so the sum is complete.
        """
        sent, received = self._wire.bytes_sent, self._wire.bytes_received
        counts = {
            "perf/controller_bytes_sent": sent[COMMANDS],
            "perf/controller_bytes_received": received[RESULTS],
            "perf/rank_0_bytes_sent": sent.total(),
            "perf/rank_0_bytes_received": received.total(),
            **{f"perf/bytes/{method}": count for method, count in self._column_bytes.items()},
        }
        for counter in (sent, received, self._column_bytes):
            counter.clear()
        return {name: float(count) for name, count in counts.items()}

    def ask_busy(self, step: int = 0) -> Future[list[BusyReport]]:
        """What every rank was busy with, and its memory. Ranks report between two commands, or in a method that calls
        `Executor.poll`. There they also write their trace of `step`."""
        return self._call_all_ranks(BUSY, BUSY, step)

    def end_trace_step(self, step: int) -> None:
        """Write rank 0's trace of `step`."""
        if self._executor.trace is not None:
            self._executor.trace.end_step(step)

    def align_clocks(self) -> None:
        """Measure the clocks of all ranks for the trace, if the last time was long ago. For a time at which all ranks
        wait for commands."""
        if self._executor.trace is not None and self._executor.trace.is_alignment_due():
            self._call_all_ranks(TRACE, "align", reports=False)
            while self._own:
                self._run_own()

    def begin_profile(self) -> None:
        """Every rank records a trace of torch's profiler: rank 0 from now on, the others between the commands before
        and after, or inside a long method, where it polls for commands."""
        self._call_all_ranks(PROFILE, "begin", reports=False)
        while self._own:
            self._run_own()

    def end_profile(self, stem: str | None) -> Future[list[str | None]]:
        """Write each rank's trace to a file (`Profiler.end`). The future has an error message per rank, None where it
        succeeded."""
        return self._call_all_ranks(PROFILE, "end", stem)

    def stop(self) -> None:
        """Finish rank 0's own commands, and end the serve loops of the other ranks."""
        while self._own:
            self._run_own()
        for rank in range(1, self._wire.size):
            self._wire.send(Command(self._number(), None, STOP), rank, COMMANDS)
        # Receive what is still under way: a rank cannot exit before its messages have been received.
        self.listener = self.background = None
        while len(self._stopped) < self._wire.size - 1:
            self._receive_result()
        self._wire.flush()

    def _call_all_ranks(self, role: str, method: str, *args: Any, reports: bool = True) -> Future[list[Any]]:
        ranks = tuple(range(self._wire.size))
        call = _Call(self._number(), method, ranks if reports else (), runs_here=True)
        for rank in ranks:
            self._issue(rank, Command(call.id, role, method, args, reports=reports))
        return Future(lambda: self._wait_for(call), lambda: self._is_complete(call))

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _plan(self, group: WorkerGroup, method: str, registration: Registration, batch: DataProto) -> _Plan:
        assignment = _assignment(batch, group.layout, registration.group_by)
        destination = np.asarray(group.layout.leaders, np.int32)[assignment]
        reads: list[Read] = []
        sample_reads: list[str] = []
        for entry in registration.reads:
            name = entry.removesuffix("?")
            if name in batch.samples:
                sample_reads.append(name)
                continue
            column = batch.tokens.get(name)
            if column is None and name != entry:
                continue
            if column is None:
                known = ", ".join(sorted({*batch.tokens, *batch.samples}))
                raise KeyError(f"{group.role}.{method} reads {name!r}; the batch has {known}")
            if not isinstance(column, PlacedColumn):
                raise TypeError(f"{group.role}.{method} reads {name!r}, which is on rank 0; only columns on ranks move")
            location, moved_to = column.nearest(destination), None
            if (location.rank != destination).any():
                # The moved rows stay at their destination, for the next method that reads them there.
                block = self._new_block(destination)
                column.locations.append(Location.of_block(block, destination))
                moved_to = block.id
            reads.append(Read(name, location, moved_to))
        rows = rows_of_each(assignment, group.layout.dp)
        writes = {name.removesuffix("?"): self._new_block(destination) for name in registration.writes}
        return _Plan(tuple(reads), destination, rows, sample_reads, writes)

    def _new_block(self, ranks: np.ndarray) -> Block:
        """A block whose rows are at `ranks`, which free them when rank 0 has no more references to it."""
        block = Block(self._number())
        weakref.finalize(block, self._free_later, block.id, ranks_in(ranks))
        return block

    def _free_later(self, block: int, ranks: list[int]) -> None:
        for rank in ranks:
            self._unreferenced[rank].append(block)

    def _issue_to_owners(self, command: int, plan: _Plan, running: set[int]) -> None:
        """Have the ranks that do not run the method send the rows that they have."""
        ranks = [read.location.rank for read in plan.reads]
        owners = {rank for has in ranks for rank in ranks_in(has[has != plan.destination])}
        for rank in sorted(owners - running):
            self._issue(rank, Command(command, None, "send rows", share=plan.shares.of(rank)))

    def _issue(self, rank: int, command: Command) -> None:
        if free := tuple(self._unreferenced.pop(rank, ())):
            command = replace(command, free=free)
        if rank == self._wire.rank:
            self._own.append(command)
        else:
            self._wire.send(command, rank, COMMANDS)

    def _run_own(self) -> None:
        result = self._executor.run(self._own.popleft())
        if result is not None:
            self._results[result.command][result.rank] = result

    def _receive_result(self) -> None:
        message: Result | Notification | Shutdown = self._wire.receive(None, RESULTS)
        if isinstance(message, Result):
            self._results[message.command][message.rank] = message
        elif isinstance(message, Shutdown):
            self._stopped.add(message.rank)
        elif self.listener is not None:
            self.listener(message.rank, message.value)

    def _is_complete(self, call: _Call) -> bool:
        return len(self._results.get(call.id, ())) == len(call.reporters)

    def _wait_for(self, call: _Call) -> list[Any]:
        """Wait for all results of a call; returns the values in the order of its reporters."""
        while self._own and self._own[0].id <= call.id:
            self._run_own()
        while not self._is_complete(call):
            if self.background is not None:
                self.background()
            if self._is_complete(call):
                break
            if self._own and not call.runs_here:
                self._run_own()  # the call runs on other ranks, so rank 0 can run a later command of its own
            else:
                self._receive_result()
        results = self._results.pop(call.id, {})
        row_bytes = sum(result.row_bytes for result in results.values())
        if row_bytes:
            self._column_bytes[call.method] += row_bytes
        return [results[rank].value for rank in call.reporters]

    def _collector(self, plan: _Plan) -> Callable[[list[Any]], DataProto]:
        """A function that puts the rows of all replicas back into batch order; written columns become locations."""
        order = np.argsort(np.concatenate(plan.rows), kind="stable")

        def collect(results: list[BatchResult]) -> DataProto:
            written = results[0].written
            if any(part.written != written for part in results):
                raise ValueError(f"replicas wrote different columns: {[part.written for part in results]}")
            tokens: Columns = {
                name: PlacedColumn([Location.of_block(plan.writes[name], plan.destination)], self.fetch)
                for name in written
            }
            samples = {
                name: np.concatenate([part.samples[name] for part in results])[order] for name in results[0].samples
            }
            metrics = [part.meta["metrics"] for part in results if "metrics" in part.meta]
            return DataProto(tokens, samples, {"metrics": metrics})

        return collect


@dataclass(frozen=True)
class _Call:
    """An issued command. reporters: ranks that send a result. runs_here: rank 0 runs the method too."""

    id: int
    method: str
    reporters: tuple[int, ...]
    runs_here: bool


@dataclass(frozen=True)
class _Plan:
    """How a batch is divided for one call: where every row goes, and which rows each replica has."""

    reads: tuple[Read, ...]
    destination: np.ndarray
    rows: list[np.ndarray] = field(default_factory=list)
    sample_reads: list[str] = field(default_factory=list)
    writes: dict[str, Block] = field(default_factory=dict)

    @cached_property
    def shares(self) -> Shares:
        return Shares(self.reads, self.destination)

    def parts(self, batch: DataProto, layout: Layout, registration: Registration) -> Callable[[int], dict[str, Any]]:
        """A function that returns the fields of a rank's command that are about the batch."""
        common = {
            "meta": {name: value for name, value in batch.meta_info.items() if name != "metrics"},
            "writes": {name: block.id for name, block in self.writes.items()},
            "broadcasts": not registration.leader_only and layout.size > layout.dp and bool(registration.reads),
        }
        replica = {leader: dp for dp, leader in enumerate(layout.leaders)}

        def part(rank: int) -> dict[str, Any]:
            rows = self.rows[replica[rank]] if rank in replica else None
            samples = {} if rows is None else {name: batch.samples[name][rows] for name in self.sample_reads}
            return {"share": self.shares.of(rank), "samples": samples, **common}

        return part


def _assignment(batch: DataProto, layout: Layout, group_by: str | None) -> np.ndarray:
    """int32 (N,) replica of every row: the batch's own assignment, unless it splits groups that must stay together."""
    name = replica_column(layout.dp)
    if name in batch.samples:
        assignment = batch.samples[name]
        if group_by is None or _keeps_together(assignment, batch.samples[group_by]):
            return assignment
    size = len(batch)
    if group_by is None:
        parts = [len(part) for part in np.array_split(np.arange(size), layout.dp)]
        return np.repeat(np.arange(layout.dp, dtype=np.int32), parts)
    _, groups = np.unique(batch.samples[group_by], return_inverse=True)
    return balanced_assignment(np.ones(size, np.int64), layout.dp, groups=groups)


def _keeps_together(assignment: np.ndarray, groups: np.ndarray) -> bool:
    _, index = np.unique(groups, return_inverse=True)
    first = np.full(index.max() + 1 if len(index) else 0, -1, np.int64)
    first[index] = assignment  # that of one row of each group, with which all others must agree
    return bool((first[index] == assignment).all())


def run_program(
    world: World,
    workers: Mapping[str, Worker],
    kinds: Mapping[str, type[Worker]],
    layouts: Mapping[str, Layout],
    program: Callable[[Controller], T],
    trace: RankTrace | None = None,
) -> T | None:
    """Run `program` on rank 0 while the other ranks serve it. Returns its result on rank 0, None elsewhere.

    Args:
        workers: this rank's worker of each role that it is in.
        kinds: worker class of every role, also of those that this rank is not in.
        layouts: layout of every role.
        trace: where this rank's trace is written, if the job records one.
    """
    executor = Executor(world, workers, layouts, trace)
    result = None
    with world.status.within("controller", "program" if world.rank == 0 else "next command"):
        if world.rank == 0:
            controller = Controller(executor, kinds)
            result = program(controller)
            controller.stop()
        else:
            executor.serve()
    executor.close()
    return result
