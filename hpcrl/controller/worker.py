"""The base of what runs on a role's ranks."""

from __future__ import annotations

from hpcrl.grid.layout import Layout


class Worker:
    """One rank's part of a role. Methods marked with `@register` can be called from rank 0.

    A method of a batch mode gets the rows of its replica as a DataProto, the same on every rank of the replica; what
    the replica's home rank returns counts, what the others return is dropped.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank

    @property
    def is_home(self) -> bool:
        return self.rank == self.layout.home(self.layout.coord(self.rank).dp)
