"""Workers and `@register`: how a method is called from rank 0, and which columns it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hpcrl.runtime.layout import Layout
from hpcrl.runtime.rank_status import RankStatus

if TYPE_CHECKING:
    from hpcrl.config.roles import RoleSpec
    from hpcrl.controller.executor import Executor

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class DispatchMode:
    """One way of running a method on a role's ranks. All of them get the same arguments.

    reporters: the ranks whose results rank 0 receives, in order. takes_batch: the first argument is a DataProto, whose
    rows are divided over the replicas and whose columns move from owner to owner. returns_batch: the results form a
    DataProto, whose written columns stay on the ranks.
    """

    name: str
    reporters: Callable[[Layout], Sequence[int]]
    takes_batch: bool = False
    returns_batch: bool = False


class Dispatch:
    """How a method is dispatched, under verl's names where verl has the same.

    * ONE_TO_ALL: all ranks run it; the future gives a list with the result of each rank.
    * DP_COMPUTE_PROTO: takes a batch and returns one, in the order of the batch's rows.
    * DP_COMPUTE_METRIC: takes a batch; the future gives a list with the result of each replica.
    * ORDER_ALL: as ONE_TO_ALL, without results: there is nothing to wait for.
    * DP_ORDER: as DP_COMPUTE_METRIC, without results.
    """

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", lambda layout: layout.ranks)
    DP_COMPUTE_PROTO = DispatchMode(
        "DP_COMPUTE_PROTO", lambda layout: layout.leaders, takes_batch=True, returns_batch=True
    )
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", lambda layout: layout.leaders, takes_batch=True)
    ORDER_ALL = DispatchMode("ORDER_ALL", lambda layout: ())
    DP_ORDER = DispatchMode("DP_ORDER", lambda layout: (), takes_batch=True)


@dataclass(frozen=True)
class Registration:
    """How a worker method is called from rank 0; it decorates the method, under the name `register`.

    Args:
        mode: how the method is run on the role's ranks, and which results come back.
        reads: columns that the method needs, token-level or sample-level; `name?` is read where the batch has it.
        writes: token-level columns that it returns; they stay where they were made. `name?` may be left out, on all
            replicas alike.
        group_by: a sample-level column; rows with equal entries go to the same replica.
        leader_only: run on the leader of each replica only, for work on columns that needs no model.
        reentrant: may run inside a long method that calls `Executor.poll`, if the leader has all rows that it
            reads; it then waits for no other rank. Needs `leader_only`.
        phase: phase of a step whose time (`timing_s/<phase>`) includes the wait for the method; None: its name.
        updates: changes a model, so that a step cannot be repeated once the method has begun.
        skip_if: key of meta_info; in a job's loop the call is not issued for a batch that has it.
    """

    mode: DispatchMode
    _: KW_ONLY
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    group_by: str | None = None
    leader_only: bool = False
    reentrant: bool = False
    phase: str | None = None
    updates: bool = False
    skip_if: str | None = None

    def __post_init__(self) -> None:
        if (self.reads or self.writes or self.group_by or self.leader_only) and not self.mode.takes_batch:
            raise ValueError(f"{self.mode.name} moves no batch, so it has no columns to read or write")
        if self.reentrant and not self.leader_only:
            raise ValueError("reentrant=True is for methods that run on leaders only; set leader_only=True")

    def __call__(self, method: Method) -> Method:
        method.registration = self  # type: ignore[attr-defined]
        return method


register = Registration


def registration_of(worker: type, method: str) -> Registration:
    """The registration of a method; AttributeError names the registered ones."""
    found = getattr(getattr(worker, method, None), "registration", None)
    if found is None:
        known = sorted(name for name in dir(worker) if hasattr(getattr(worker, name), "registration"))
        raise AttributeError(f"{worker.__name__} has no registered method {method!r}; it has {', '.join(known)}")
    return found


class Worker:
    """One rank's part of a role. Methods marked with `@register` can be called from rank 0.

    A method of a mode that takes a batch gets the rows of its replica as a DataProto, the same on every rank of the
    replica. The result of the replica's leader counts; those of the other ranks are dropped.
    """

    spec: ClassVar[RoleSpec]  # declaration of the role
    context: Executor  # set by it

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.status = RankStatus()  # the executor replaces it by this rank's own

    @classmethod
    def build(cls, team: Any, role: str) -> Worker | None:
        """Make this rank's worker of the role; None outside the role's ranks. Collective over the world.

        Args:
            team: a `hpcrl.workers.team.Team`, with the workers that were built before.
        """
        raise NotImplementedError(f"{cls.__name__} has no build(team, role)")

    def tick(self) -> None:
        """Report progress. A long method calls it about once a second."""
        self.status.tick()

    def host_buffers(self) -> int:
        """Bytes of host memory that the worker keeps from phase to phase."""
        return 0

    @property
    def is_leader(self) -> bool:
        return self.rank == self.layout.leader(self.layout.coord(self.rank).dp)
