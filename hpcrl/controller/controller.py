"""The controller on rank 0: issues commands, hands out futures, keeps the metadata of batches.

Why no order of `get()` can deadlock: commands are numbered in the order in which rank 0 issues them, every rank runs
its part of command k only after its parts of all commands before k, sends never wait, and a part of k waits only for
parts of k on other ranks. `get()` runs rank 0's own parts first. So the lowest unfinished command can always go on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hpcrl.batch.balance import balanced_assignment
from hpcrl.batch.data_proto import Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.controller.columns import Location, PlacedColumn, Read, Slot
from hpcrl.controller.executor import COMMANDS, FETCH, RESULTS, STOP, Command, Executor, Result
from hpcrl.controller.register import Registration, registration_of
from hpcrl.controller.wire import decode, encode
from hpcrl.controller.worker import Worker
from hpcrl.grid.layout import Layout

if TYPE_CHECKING:
    from hpcrl.launch.world import World

T = TypeVar("T")


def replica_column(dp: int) -> str:
    """Name of the sample-level column that assigns rows to one of `dp` replicas."""
    return f"replica_of_{dp}"


class Future(Generic[T]):
    """The result of a call that may not have happened yet."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T

    def get(self) -> T:
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value


@dataclass
class Traffic:
    """Bytes since the last `collect`: rank 0's control messages (headers out, results in), and the columns that home
    ranks received from one another, by method. Homes that read a batch report, so the columns are all counted."""

    sent: int = 0
    received: int = 0
    columns: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def collect(self) -> dict[str, float]:
        found = {
            "perf/controller_bytes_sent": float(self.sent),
            "perf/controller_bytes_received": float(self.received),
            **{f"perf/bytes/{method}": float(count) for method, count in self.columns.items()},
        }
        self.sent = self.received = 0
        self.columns.clear()
        return found


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
    """Lives on rank 0. `groups[role]` are the callable roles."""

    def __init__(self, executor: Executor, workers: Mapping[str, type[Worker]]) -> None:
        self.groups = {
            role: WorkerGroup(self, role, workers[role], layout) for role, layout in executor.layouts.items()
        }
        self.traffic = Traffic()
        self._executor = executor
        self._wire = executor.wire
        self._next_id = 0
        self._own: deque[Command] = deque()
        self._results: dict[int, dict[int, Result]] = defaultdict(dict)
        self._forget: dict[int, list[int]] = defaultdict(list)

    def __getitem__(self, role: str) -> WorkerGroup:
        return self.groups[role]

    def call(
        self, group: WorkerGroup, method: str, registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        mode = registration.mode
        reporters = list(mode.reporters(group.layout))
        command = self._number()
        if not mode.takes_batch:
            shares = mode.split(group.layout, args, kwargs)
            for rank, (rank_args, rank_kwargs) in shares.items():
                self._issue(
                    rank, Command(command, group.role, method, rank_args, rank_kwargs, reports=rank in reporters)
                )
            return Future(lambda: mode.collect(self._wait_for(command, method, reporters)))
        batch, *rest = args
        plan = self._plan(group, method, registration, batch, command)
        shares = mode.split(group.layout, tuple(rest), kwargs)
        meta = {name: value for name, value in batch.meta_info.items() if name != "metrics"}
        for rank, (rank_args, rank_kwargs) in shares.items():
            rows = plan.rows[group.layout.coord(rank).dp]
            self._issue(
                rank,
                Command(
                    command,
                    group.role,
                    method,
                    rank_args,
                    rank_kwargs,
                    plan.reads,
                    plan.destination,
                    {name: batch.samples[name][rows] for name in plan.sample_reads},
                    meta,
                    reports=rank in reporters,
                ),
            )
        self._issue_to_owners(command, plan, set(shares))
        collect = self._collector(plan) if mode.returns_batch else mode.collect
        return Future(lambda: collect(self._wait_for(command, method, reporters)))

    def fetch(self, column: PlacedColumn) -> Ragged:
        """Bring a column to rank 0."""
        command = self._number()
        read = Read(column.name, column.name, column.locations[0])
        plan = _Plan(command, (read,), np.zeros(len(column), np.int32), [], [], Slot(command), ())
        self._issue(0, Command(command, FETCH, FETCH, reads=plan.reads, destination=plan.destination, reports=True))
        self._issue_to_owners(command, plan, {0})
        (columns,) = self._wait_for(command, FETCH, [0])
        self._forget[0].append(command)
        return columns[column.name]

    def stop(self) -> None:
        """Let rank 0's own commands end, and the other ranks leave their serve loops."""
        while self._own:
            self._run_own()
        for rank in range(1, self._wire.size):
            self._wire.send(encode(Command(self._number(), None, STOP)), rank, COMMANDS)
        self._wire.flush()

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _plan(
        self, group: WorkerGroup, method: str, registration: Registration, batch: DataProto, command: int
    ) -> _Plan:
        assignment = _assignment(batch, group.layout, registration.group_by)
        destination = np.asarray(group.layout.homes, np.int32)[assignment]
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
            reads.append(Read(name, column.name, column.nearest(destination)))
        slot = Slot(command)
        weakref.finalize(slot, self._forget_slot, command, np.unique(destination).tolist())
        for read in reads:
            if read.moves(destination):
                column = batch.tokens[read.column]
                column.locations.append(Location.of_command(slot, destination))  # type: ignore[union-attr]
        rows = [np.flatnonzero(assignment == dp) for dp in range(group.layout.dp)]
        return _Plan(command, tuple(reads), destination, rows, sample_reads, slot, registration.writes)

    def _forget_slot(self, command: int, ranks: list[int]) -> None:
        for rank in ranks:
            self._forget[rank].append(command)

    def _issue_to_owners(self, command: int, plan: _Plan, running: set[int]) -> None:
        owners = {rank for read in plan.reads for rank in np.unique(read.location.rank).tolist()}
        for rank in sorted(owners - running):
            if any((plan.destination[read.location.rank == rank] != rank).any() for read in plan.reads):
                self._issue(rank, Command(command, None, "send rows", reads=plan.reads, destination=plan.destination))

    def _issue(self, rank: int, command: Command) -> None:
        forget = tuple(self._forget.pop(rank, ()))
        if forget:
            command = Command(**{**command.__dict__, "forget": forget})
        if rank == self._wire.rank:
            self._own.append(command)
            return
        data = encode(command)
        self.traffic.sent += len(data)
        self._wire.send(data, rank, COMMANDS)

    def _run_own(self) -> None:
        result = self._executor.run(self._own.popleft())
        if result is not None:
            self._results[result.command][result.rank] = result

    def _wait_for(self, command: int, method: str, reporters: list[int]) -> list[Any]:
        """The values of a command's reporters, in order, once all have come."""
        while self._own and self._own[0].id <= command:
            self._run_own()
        while len(self._results[command]) < len(reporters):
            data = self._wire.receive_any(RESULTS)
            self.traffic.received += len(data)
            result: Result = decode(data)
            self._results[result.command][result.rank] = result
        results = self._results.pop(command)
        row_bytes = sum(result.row_bytes for result in results.values())
        if row_bytes:
            self.traffic.columns[method] += row_bytes
        return [results[rank].value for rank in reporters]

    def _collector(self, plan: _Plan) -> Callable[[list[Any]], DataProto]:
        """Rows of all replicas back in batch order; written columns stay on the ranks, as locations."""
        location = Location.of_command(plan.slot, plan.destination)
        order = np.argsort(np.concatenate(plan.rows), kind="stable")

        def collect(results: list[Any]) -> DataProto:
            tokens: Columns = {name: PlacedColumn(name, [location], self.fetch) for name in plan.writes}
            samples = {name: np.concatenate([part[name] for part, _ in results])[order] for name in results[0][0]}
            metrics = [meta["metrics"] for _, meta in results if "metrics" in meta]
            return DataProto(tokens, samples, {"metrics": metrics})

        return collect


@dataclass(frozen=True)
class _Plan:
    """A batch call as rank 0 lays it out."""

    command: int
    reads: tuple[Read, ...]
    destination: np.ndarray
    rows: list[np.ndarray]
    sample_reads: list[str]
    slot: Slot
    writes: tuple[str, ...] = field(default=())


def _assignment(batch: DataProto, layout: Layout, group_by: str | None) -> np.ndarray:
    """int32 (N,) replica of every row: the batch's own assignment, unless it splits groups that must stay together."""
    name = replica_column(layout.dp)
    if name in batch.samples:
        assignment = batch.samples[name]
        if group_by is None or _keeps_together(assignment, batch.samples[group_by]):
            return assignment
    size = len(batch)
    if group_by is None:
        return np.repeat(np.arange(layout.dp, dtype=np.int32), _even(size, layout.dp))
    _, groups = np.unique(batch.samples[group_by], return_inverse=True)
    return balanced_assignment(np.ones(size, np.int64), layout.dp, groups=groups)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def _keeps_together(assignment: np.ndarray, groups: np.ndarray) -> bool:
    _, index = np.unique(groups, return_inverse=True)
    first = np.full(index.max() + 1 if len(index) else 0, -1, np.int64)
    first[index] = assignment  # the last row of each group; all others must agree with it
    return bool((first[index] == assignment).all())


def run_program(
    world: World,
    workers: Mapping[str, Worker],
    kinds: Mapping[str, type[Worker]],
    layouts: Mapping[str, Layout],
    program: Callable[[Controller], T],
) -> T | None:
    """Run `program` on rank 0 while the other ranks serve it. Gives its result on rank 0, None elsewhere.

    Args:
        workers: this rank's worker of each role it is in.
        kinds: worker class of every role, in this rank's pools or not.
        layouts: layout of every role.
    """
    executor = Executor(world, workers, layouts)
    if world.rank != 0:
        executor.serve()
        executor.close()
        return None
    controller = Controller(executor, kinds)
    result = program(controller)
    controller.stop()
    executor.close()
    return result
