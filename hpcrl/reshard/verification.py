"""After a refit: do the engine's weights, on every rank, have the bits of the actor's?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hpcrl.grid.layout import Layout
from hpcrl.model.params import Box, Shard
from hpcrl.reshard.checksum import checksum
from hpcrl.reshard.pieces import Cell
from hpcrl.reshard.rectangles import Weights
from hpcrl.runtime.exits import CHECKSUM
from hpcrl.runtime.mpi import all_gather_object, wait

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.reshard.planner import Resharding

Extents = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # global rows and columns of each box
NAMED = 3  # tensors that a message names


class ChecksumMismatch(Exception):
    """The engine's weights are not the actor's; generating with them would train on nonsense."""

    exit_code = CHECKSUM


class _Region(NamedTuple):
    """A rectangle of a local tensor, where it starts in the global one, and which total it counts towards."""

    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    global_row: int
    global_col: int
    total: int


class Verifier:
    """Compares each weight of each rank's engine with what the actor's ranks say it must be.

    One total per weight and part of it that some destination rank holds. On the source each element is counted by the
    first rank that holds it, after rounding to `dtype`; one reduction over `comm`, the ranks of the refit, gives the
    expected totals to all. `scratch_bytes` bounds temporary memory.
    """

    def __init__(
        self,
        resharding: Resharding,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        rank: int,
        dtype: torch.dtype,
        scratch_bytes: int,
    ) -> None:
        self._layouts = (resharding.source, resharding.destination)
        self._comm, self._ranks, self._dtype, self._scratch_bytes = comm, ranks, dtype, scratch_bytes
        totals: dict[tuple[str, Extents], int] = {}
        wanted: dict[str, dict[int, tuple[Box, ...]]] = {}
        for cell in resharding.destination_cells:
            for shard in cell.shards:
                total = totals.setdefault((shard.name, _extents(shard)), len(totals))
                wanted.setdefault(shard.name, {})[total] = shard.boxes
        self._num_totals = len(totals)
        self._counted = [
            region
            for name, box in _first_held(resharding.source_cells, rank)
            for total, boxes in wanted.get(name, {}).items()
            for part in boxes
            if (region := _overlap(name, box, part, total))
        ]
        self._held = [
            region
            for cell in resharding.destination_cells
            if rank in cell.ranks
            for shard, name in zip(cell.shards, cell.dst_names, strict=True)
            for box in shard.boxes
            if (region := _overlap(name, box, box, totals[shard.name, _extents(shard)]))
        ]

    def check(self, source: Weights, destination: Weights) -> None:
        """ChecksumMismatch on every rank where any rank's weights differ. Every rank of the refit calls this."""
        from mpi4py import MPI

        expected = self._sum(self._counted, source)
        wait(self._comm.Iallreduce(MPI.IN_PLACE, expected, MPI.SUM))  # wraps around at 2^64
        found = self._sum(self._held, destination)
        wrong = list(dict.fromkeys(part.tensor for part in self._held if found[part.total] != expected[part.total]))
        everyone = all_gather_object(self._comm, wrong)
        if any(everyone):
            raise ChecksumMismatch(self._message(dict(zip(self._ranks, everyone, strict=True))))

    def _sum(self, regions: list[_Region], weights: Weights) -> np.ndarray:
        """uint64 (totals,)."""
        sums = [0] * self._num_totals
        for part in regions:
            tensor = weights[part.tensor]
            values = tensor.view(tensor.size(0), -1)[part.row : part.row + part.rows, part.col : part.col + part.cols]
            sums[part.total] += checksum(values, part.global_row, part.global_col, self._dtype, self._scratch_bytes)
        return np.array([total % 2**64 for total in sums], np.uint64)

    def _message(self, wrong: dict[int, list[str]]) -> str:
        tensors = Counter(name for names in wrong.values() for name in names)
        said = "; ".join(
            f"{name} on rank{'s' * (count > 1)} {', '.join(str(rank) for rank in wrong if name in wrong[rank])}"
            for name, count in tensors.most_common(NAMED)
        )
        more = f"; and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
        source, destination = map(_described, self._layouts)
        return (
            f"the rollout engine's weights are not the actor's after a refit: checksums differ for {said}{more}; "
            f"actor {source} -> rollout {destination}; suspect memory or network of these ranks, and if it happens "
            "again, report it as a bug"
        )


def _first_held(cells: list[Cell], rank: int) -> list[tuple[str, Box]]:
    """The rectangles of which `rank` is the first holder; over all ranks, each element of the model once."""
    firsts: dict[tuple[str, Box], int] = {}
    found = []
    for cell in cells:
        for shard in cell.shards:
            for box in shard.boxes:
                place = (shard.name, box._replace(local_row=0, local_col=0))
                if firsts.setdefault(place, cell.ranks[0]) == rank and cell.ranks[0] == rank:
                    found.append((shard.name, box))
    return found


def _extents(shard: Shard) -> Extents:
    return tuple((box.global_rows, box.global_cols) for box in shard.boxes)


def _overlap(tensor: str, held: Box, other: Box, total: int) -> _Region | None:
    """The part of `held` that lies in `other`."""
    top, bottom = max(held.global_rows[0], other.global_rows[0]), min(held.global_rows[1], other.global_rows[1])
    left, right = max(held.global_cols[0], other.global_cols[0]), min(held.global_cols[1], other.global_cols[1])
    if top >= bottom or left >= right:
        return None
    row, col = held.local_row + top - held.global_rows[0], held.local_col + left - held.global_cols[0]
    return _Region(tensor, row, col, bottom - top, right - left, top, left, total)


def _described(layout: Layout) -> str:
    sizes = " ".join(
        f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "ep", "vpp") if getattr(layout, axis) > 1
    )
    return f"({sizes or 'whole'}, ranks {_ranges(layout.ranks)})"


def _ranges(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) > 1
    return f"{ranks[0]}-{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
