"""Verification of a refit: checksums of weights that compose over shards of any layout."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.grid.layout import Layout
from hpcrl.model.params import Box, Shard
from hpcrl.reshard.messages import Weights
from hpcrl.reshard.pieces import ShardGroup
from hpcrl.runtime.exits import CHECKSUM
from hpcrl.runtime.mpi import all_gather_object, wait
from hpcrl.runtime.watchdog import format_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.reshard.planner import Resharding


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLS = 0x2545F4914F6CDD1D, 0x9E3779B97F4A7C15  # so that row n and column n have different hashes
_COLS_AT_ONCE = 1024
SCRATCH_PER_ELEMENT = 48  # bytes of temporary memory per element that is worked on at once, at most


def odd_hashes(start: int, stop: int, salt: int, device: torch.device) -> Tensor:
    """Return int64 (stop - start,): an odd hash of each index, by the finaliser of splitmix64 (Steele et al. 2014)."""
    x = torch.arange(start, stop, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def checksum(values: Tensor, row: int, col: int, dtype: torch.dtype, scratch_bytes: int = 2**20) -> int:
    """Return the sum over elements of bits(x) times an odd hash of the global index, modulo 2^64.

    `values` (rows, cols) are the part of a global tensor that starts at (row, col); the bits are taken after rounding
    to `dtype`. The hash of an index is the product of its row's and its column's. A change of any bit of one element
    always changes the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    at_once = max(1, scratch_bytes // SCRATCH_PER_ELEMENT)
    width = min(values.size(1), _COLS_AT_ONCE, at_once)
    height = max(1, at_once // width)
    bits = _BITS[dtype.itemsize]
    for left in range(0, values.size(1), width):
        block = values[:, left : left + width]
        of_col = odd_hashes(col + left, col + left + block.size(1), _COLS, values.device)
        for top in range(0, values.size(0), height):
            part = block[top : top + height]
            of_row = odd_hashes(row + top, row + top + part.size(0), _ROWS, values.device)
            words = part.to(dtype).view(bits).to(torch.int64, copy=True)
            total += (words.mul_(of_col).sum(1) * of_row).sum()
    return int(total) % 2**64


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


Extents = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # global rows and columns of each box
MAX_NAMED = 3  # tensors that a message names


class ChecksumMismatch(Exception):
    """The engine's weights differ from the actor's."""

    exit_code = CHECKSUM


class _Region(NamedTuple):
    """A rectangle of a local tensor, where it starts in the global tensor, and the total that it counts towards."""

    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    global_row: int
    global_col: int
    total: int


class Verifier:
    """Compares each weight of each rank's engine with the actor's.

    There is one total per weight and part of it that some destination rank holds. On the source each element is counted
    by the first rank that holds it, after rounding to `dtype`; one reduction over `comm`, the ranks of the refit, gives
    all ranks the expected totals. `scratch_bytes` bounds temporary memory.
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
        boxes_by_name: dict[str, dict[int, tuple[Box, ...]]] = {}
        for group in resharding.destination_groups:
            for shard in group.shards:
                total = totals.setdefault((shard.name, _extents(shard)), len(totals))
                boxes_by_name.setdefault(shard.name, {})[total] = shard.boxes
        self._num_totals = len(totals)
        self._source_regions = [
            region
            for name, box in _counted_boxes(resharding.source_groups, rank)
            for total, boxes in boxes_by_name.get(name, {}).items()
            for part in boxes
            if (region := _overlap(name, box, part, total))
        ]
        self._destination_regions = [
            region
            for group in resharding.destination_groups
            if rank in group.ranks
            for shard in group.shards
            for box in shard.boxes
            if (region := _overlap(shard.local_name, box, box, totals[shard.name, _extents(shard)]))
        ]

    def check(self, source: Weights, destination: Weights) -> None:
        """Raise ChecksumMismatch on every rank if any rank's weights differ. Collective over the refit's ranks."""
        from mpi4py import MPI

        expected = self._sum(self._source_regions, source)
        wait(self._comm.Iallreduce(MPI.IN_PLACE, expected, MPI.SUM))  # wraps around at 2^64
        found = self._sum(self._destination_regions, destination)
        differs = found != expected
        wrong = list(dict.fromkeys(part.tensor for part in self._destination_regions if differs[part.total]))
        wrong_by_rank = all_gather_object(self._comm, wrong)
        if any(wrong_by_rank):
            raise ChecksumMismatch(self._message(dict(zip(self._ranks, wrong_by_rank, strict=True))))

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
        listed = "; ".join(
            f"{name} on {format_ranks([rank for rank in wrong if name in wrong[rank]])}"
            for name, _ in tensors.most_common(MAX_NAMED)
        )
        more = f"; and {len(tensors) - MAX_NAMED} more" if len(tensors) > MAX_NAMED else ""
        source, destination = map(_described, self._layouts)
        return (
            f"refit: the rollout engine's weights differ from the actor's: checksums differ for {listed}{more}; "
            f"actor {source} -> rollout {destination}; check memory and network of these ranks; report a bug if it "
            "happens again"
        )


def _counted_boxes(groups: list[ShardGroup], rank: int) -> list[tuple[str, Box]]:
    """Return the rectangles of which `rank` is the first holder; over all ranks, each element of the model once."""
    firsts: dict[tuple[str, Box], int] = {}
    found = []
    for group in groups:
        for shard in group.shards:
            for box in shard.boxes:
                place = (shard.name, box._replace(local_row=0, local_col=0))
                if firsts.setdefault(place, group.ranks[0]) == rank and group.ranks[0] == rank:
                    found.append((shard.name, box))
    return found


def _extents(shard: Shard) -> Extents:
    return tuple((box.global_rows, box.global_cols) for box in shard.boxes)


def _overlap(tensor: str, held: Box, other: Box, total: int) -> _Region | None:
    """Return the part of `held` that lies in `other`."""
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
    return f"({sizes or 'whole'}, {format_ranks(layout.ranks)})"
