"""A role as a job's loop calls it: calls return at once, `|` joins their columns, waiting is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.algorithms.metrics import finish, finish_over_steps, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.controller.controller import Future, WorkerGroup
from hpcrl.controller.register import registration_of

if TYPE_CHECKING:
    from hpcrl.run.run import Run


@dataclass
class Call:
    """A worker method that was issued on all ranks of a role. `get()` waits for its result and logs its metrics."""

    run: Run
    phase: str
    future: Future[Any]
    prefix: str  # of the metrics' keys
    columns: DataProto | None = None  # that the method returned

    def get(self) -> DataProto:
        """The columns that the method returned; none if it returned metrics only."""
        if self.columns is None:
            with self.run.timers(self.phase):
                result = self.future.get()
            self.columns = result if isinstance(result, DataProto) else DataProto({}, {}, {"metrics": result})
            for name, value in metrics_of(self.columns.meta_info.pop("metrics", [])).items():
                group = "perf/" if name.startswith("perf/") else ""  # where times and sizes stay
                self.run.log({f"{group}{self.prefix}{name.removeprefix('perf/')}": value})
        return self.columns


class PendingBatch:
    """A batch, with the columns of calls that may still run. `a | b` has the columns of both, and does not wait."""

    def __init__(self, batch: DataProto, calls: Iterable[Call] = ()) -> None:
        self._batch = batch
        self._calls = list(calls)

    def __or__(self, other: PendingBatch) -> PendingBatch:
        return PendingBatch(self._batch, [*self._calls, *other._calls])

    def __ror__(self, batch: DataProto) -> PendingBatch:
        return PendingBatch(batch, self._calls)

    def get(self) -> DataProto:
        """Wait for the calls, and return the batch with their columns."""
        for call in self._calls:
            self._batch = self._batch.union(call.get())
        self._calls = []
        return self._batch


class Role:
    """Calls the methods of a role's workers: `actor.update_actor(batch)`. If the job does not have the role (`group` is
    None), every call returns its batch unchanged."""

    def __init__(self, run: Run, group: WorkerGroup | None) -> None:
        self._run = run
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., PendingBatch]:
        if method.startswith("__"):
            raise AttributeError(method)
        group = self._group
        if group is None:
            return lambda batch, *_, **__: batch if isinstance(batch, PendingBatch) else PendingBatch(batch)
        registration = registration_of(group.worker, method)
        spec = getattr(group.worker, "spec", None)
        prefix = spec.metric_prefix if spec is not None else ""

        def call(batch: DataProto | PendingBatch, *args: Any, **kwargs: Any) -> PendingBatch:
            batch = batch.get() if isinstance(batch, PendingBatch) else batch
            if registration.skip_if is not None and batch.meta_info.get(registration.skip_if):
                return PendingBatch(batch)
            future = getattr(group, method)(batch, *args, **kwargs)
            if registration.updates:
                self._run.begin_update()
            issued = Call(self._run, registration.phase or method, future, prefix)
            self._run.calls.append(issued)
            return PendingBatch(batch, [issued])

        return call


def metrics_of(parts: list[Any]) -> dict[str, float]:
    """One number per key, from the reports of all replicas: metrics by key, or a list of such, one per optimizer
    step."""
    if parts and isinstance(parts[0], list):
        return finish_over_steps(merge(of_step) for of_step in zip(*parts, strict=True))
    return finish(merge(parts))
