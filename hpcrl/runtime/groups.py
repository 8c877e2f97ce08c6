"""Process groups of each role: created once, in one order, shared by roles with the same ranks.

`parallel_state` is never initialised: every role has its own `ProcessGroupCollection`, so that roles with different
layouts can use the same ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from hpcrl.runtime.layout import GROUP_DIMS, Coord, Layout
from hpcrl.runtime.platform import make_gather_buffer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Megatron's further names of groups in GROUP_DIMS; one optimizer instance spans all data-parallel ranks.
ALIASES = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp", "intra_dist_opt": "all"}


class GroupCache:
    """Tuple of world ranks -> process group. `get` is collective over the world, in the same order on every rank.

    `timeout` of the groups' collectives; None: torch's default.
    """

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}

    def get(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Return the group of these ranks; None if this rank is not a member.

        A group of size 1 exists on its member only and needs no communicator.
        """
        if len(ranks) == 1 and ranks[0] != self._rank:
            return None
        if ranks not in self._groups:
            made = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=len(ranks) == 1)
            self._groups[ranks] = made if self._rank in ranks else None
        return self._groups[ranks]


@dataclass(frozen=True)
class RoleGroups:
    """One rank's place in one role: its coordinates and its process groups."""

    role: str
    layout: Layout
    rank: int
    pgc: ProcessGroupCollection
    replica: ProcessGroup = field(repr=False)

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    @property
    def tp(self) -> ProcessGroup:
        return self.pgc.tp

    @property
    def pp(self) -> ProcessGroup:
        return self.pgc.pp

    @property
    def dp(self) -> ProcessGroup:
        return self.pgc.dp

    @property
    def is_first_stage(self) -> bool:
        return self.coord.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coord.pp == self.layout.pp - 1

    @property
    def is_leader(self) -> bool:
        return self.rank == self.layout.leader(self.coord.dp)


def make_groups(layouts: dict[str, Layout], rank: int, cache: GroupCache | None = None) -> dict[str, RoleGroups]:
    """Make every group of every role. Return this rank's groups of the roles that it has.

    Collective over the world: all ranks call it with the same layouts.
    """
    cache = cache or GroupCache(rank)
    roles = {}
    for role, layout in layouts.items():
        own = {
            name: _own_group([cache.get(ranks) for ranks in layout.groups(*dims)]) for name, dims in GROUP_DIMS.items()
        }
        embd, pos_embd = _embedding_groups(layout, cache)
        if rank not in layout:
            continue
        named = {name: group for name, group in own.items() if name not in ("replica", "all")}
        named |= {alias: own[name] for alias, name in ALIASES.items()}
        pgc = ProcessGroupCollection(**named, embd=embd, pos_embd=pos_embd, inter_dist_opt=None, hcp=None)
        roles[role] = RoleGroups(role, layout, rank, pgc, own["replica"])
    return roles


def _own_group(groups: list[ProcessGroup | None]) -> ProcessGroup | None:
    """Return the only group of the list that has this rank. The list is complete, because creating groups is
    collective."""
    return next((group for group in groups if group is not None), None)


def _embedding_groups(layout: Layout, cache: GroupCache) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the groups that sum tied word embeddings (first and last stage) and position embeddings (first stage)."""
    embd = pos_embd = None
    for stages in layout.groups("pp"):
        ends = (stages[0], stages[-1]) if len(stages) > 1 else (stages[0],)
        embd = cache.get(ends) or embd
        pos_embd = cache.get(stages[:1]) or pos_embd
    return embd, pos_embd


class OwnGroups(GroupCache):
    """The groups of one rank, made without the other ranks."""

    def get(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        if self._rank not in ranks:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[RoleGroups]:
    """Context in which this process is a rank of a layout, in a world that ends with the layout's last rank. It has
    nothing of a rank that the process was before.

    Process groups are of torch's "fake" backend: they have a size and a rank, and their collectives do nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make_gather_buffer()
    hook = sys.excepthook  # torch puts its own around it each time
    dist.init_process_group("fake", rank=rank, world_size=max(layout.ranks) + 1, store=FakeStore())
    try:
        yield make_groups({"role": layout}, rank, OwnGroups(rank))["role"]
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
