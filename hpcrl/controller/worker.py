"""The base class of what runs on a role's ranks."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from hpcrl.grid.layout import Layout
from hpcrl.runtime.rank_status import RankStatus


class WorkerContext(Protocol):
    """What a worker method can do while it runs, besides returning a result."""

    def poll(self) -> bool:
        """Run received commands that may run inside the current method: those registered as `reentrant`, and sends of
        rows to other ranks. Returns True when the next command has to wait for the end of the method. Does not block.
        """
        ...

    def notify_controller(self, value: Any) -> None:
        """Send a small object to `Controller.listener` on rank 0. Does not block."""
        ...

    def publish(self, key: str, text: str) -> None:
        """Publish a string to rank 0 through the c10d store. Safe from any thread."""
        ...

    def broadcast(self, layout: Layout, value: Any) -> Any:
        """Return the leader's `value` on every rank of its replica. Collective over the replica; None is cheapest."""
        ...


class Worker:
    """One rank's part of a role. Methods marked with `@register` can be called from rank 0.

    A method of a mode that takes a batch gets the rows of its replica as a DataProto, the same on every rank of the
    replica. The result of the replica's leader counts; those of the other ranks are dropped.
    """

    # The roles on whose ranks it lives, for a worker that placement does not name.
    colocated_with: ClassVar[tuple[str, ...]] = ()
    context: WorkerContext  # set by the executor

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.status = RankStatus()  # the executor replaces it by this rank's own

    @classmethod
    def build(cls, team: Any, role: str) -> Worker | None:
        """Make this rank's worker of the role; None outside the role's ranks. Collective over the world.

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
