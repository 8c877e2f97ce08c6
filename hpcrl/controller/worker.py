"""The base of what runs on a role's ranks."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from hpcrl.grid.layout import Layout
from hpcrl.runtime.rank_status import RankStatus


class Desk(Protocol):
    """What this rank's executor does for a method that takes long."""

    def attend(self) -> bool:
        """Runs commands that have come and may run meanwhile (`@register(..., meanwhile=True)`, and rows that others
        need); true when the next one has to wait for the end of this method. Does not wait."""
        ...

    def tell(self, note: Any) -> None:
        """Sends rank 0's listener (`Controller.listener`) something small. Does not wait."""
        ...

    def post(self, key: str, text: str) -> None:
        """Leaves a text for rank 0 on the job's board. From any thread, and for that alone: it is no message of MPI."""
        ...

    def share(self, layout: Layout, value: Any) -> Any:
        """The home's `value` on every rank of its replica, each of which calls this; None costs least."""
        ...


class Worker:
    """One rank's part of a role. Methods marked with `@register` can be called from rank 0.

    A method of a batch mode gets the rows of its replica as a DataProto, the same on every rank of the replica; what
    the replica's home rank returns counts, what the others return is dropped.
    """

    # The roles on whose ranks it lives, for a worker that placement does not name.
    colocated_with: ClassVar[tuple[str, ...]] = ()
    desk: Desk  # set by the executor

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
        """To be called about every second by a method that takes long: it gets on."""
        self.status.tick()

    def host_buffers(self) -> int:
        """Bytes of host memory that it keeps from phase to phase."""
        return 0

    @property
    def is_home(self) -> bool:
        return self.rank == self.layout.home(self.layout.coord(self.rank).dp)
