"""The rank grid of one role, as arithmetic. No torch, no MPI."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

AXES = ("tp", "cp", "dp", "pp")  # fastest first: Megatron's order of dense ranks
EXPERT_AXES = ("etp", "ep", "edp", "pp")  # the same ranks, in the expert grid of MoE layers
# Micro-batches have a multiple of so many tokens: CPU matrix products then compute a row bitwise alike for any number
# of rows.
ROW_MULTIPLE = 8
FP8_ROWS = 32  # the same of a model with 8-bit products: they need a multiple of 16, of 32 under the mxfp8 recipe

# Megatron's name of a group -> the grid dimensions its members differ along.
GROUP_DIMS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("dp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "replica": ("tp", "cp", "pp"),
    "all": ("tp", "cp", "dp", "pp"),
}


class Coord(NamedTuple):
    """Position of a rank in its role's grid."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoord(NamedTuple):
    """Position of a rank in its role's expert grid."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """A role's ranks as a tp x cp x dp x pp grid; `ranks[i]` is the world rank at grid index i, tp fastest.

    The expert grid (etp x ep x edp x pp) uses the same ranks. dp is the pool's size divided by the other sizes.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise ValueError(f"a layout needs distinct ranks, found {self.ranks}")
        for name, size in (("tp*cp*pp", self.tp * self.cp * self.pp), ("etp*ep*pp", self.etp * self.ep * self.pp)):
            if len(self.ranks) % size:
                raise ValueError(f"{name}={size} does not divide the pool's {len(self.ranks)} ranks")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def dp(self) -> int:
        return self.size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.size // (self.etp * self.ep * self.pp)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def token_multiple(self, rows: int) -> int:
        """Return the multiple of a packed micro-batch's tokens, if matrix products need multiples of `rows`:
        tensor-parallel ranks split the tokens, and context-parallel ranks have two chunks each."""
        return math.lcm(self.tp, rows) * (2 * self.cp if self.cp > 1 else 1)

    def scheduled(self, count: int) -> int:
        """Return the smallest number of micro-batches, at least `count`, that the pipeline schedule supports: a
        multiple of pp if it is interleaved."""
        return -(-count // self.pp) * self.pp if self.vpp > 1 else count

    def __contains__(self, rank: object) -> bool:
        return rank in self._index

    def coord(self, rank: int) -> Coord:
        return Coord(*self._position(rank, AXES))

    def expert_coord(self, rank: int) -> ExpertCoord:
        return ExpertCoord(*self._position(rank, EXPERT_AXES))

    def _position(self, rank: int, axes: tuple[str, ...]) -> Iterator[int]:
        index = self._index[rank]
        for axis in axes:
            index, place = divmod(index, getattr(self, axis))
            yield place

    def rank_of(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return self.ranks[tp + self.tp * (cp + self.cp * (dp + self.dp * pp))]

    def groups(self, *dims: str) -> list[tuple[int, ...]]:
        """Return all groups whose members differ only along `dims`, of AXES or of EXPERT_AXES; members in rank order of
        the grid."""
        axes = AXES if set(dims) <= set(AXES) else EXPERT_AXES
        unknown = set(dims) - set(axes)
        if unknown:
            raise ValueError(f"unknown grid dimension {sorted(unknown)}; use some of {AXES} or of {EXPERT_AXES}")
        sizes = [getattr(self, axis) for axis in axes]
        strides = [math.prod(sizes[:place]) for place in range(len(axes))]

        def offsets(chosen: list[int]) -> list[int]:
            steps = [range(0, sizes[place] * strides[place], strides[place]) for place in reversed(chosen)]
            return [sum(combination) for combination in itertools.product(*steps)]

        along = [place for place, axis in enumerate(axes) if axis in dims]
        across = [place for place in range(len(axes)) if place not in along]
        return [tuple(self.ranks[start + step] for step in offsets(along)) for start in offsets(across)]

    def group_of(self, rank: int, *dims: str) -> tuple[int, ...]:
        return next(group for group in self.groups(*dims) if rank in group)

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return the world ranks of one model replica: all its tp, cp and pp coordinates."""
        places = itertools.product(range(self.pp), range(self.cp), range(self.tp))
        return tuple(self.rank_of(tp, cp, dp, pp) for pp, cp, tp in places)

    def leader(self, dp: int) -> int:
        """Return the rank that holds the replica's columns: tp 0, cp 0, last pipeline stage."""
        return self.rank_of(dp=dp, pp=self.pp - 1)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        return tuple(self.leader(dp) for dp in range(self.dp))
