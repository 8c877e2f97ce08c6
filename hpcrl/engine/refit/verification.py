"""Verification of a refit by checksums of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.engine.refit.messages import Buffers, Weights
from hpcrl.engine.refit.pieces import ShardGroup
from hpcrl.kernels.checksum import SCRATCH_PER_ELEMENT, add_checksum
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.model.blocks.block import Box
from hpcrl.model.params import Shard
from hpcrl.runtime.exits import CHECKSUM
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.mpi import all_gather_object, wait
from hpcrl.runtime.watchdog import format_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.engine.refit.planner import Resharding
    from hpcrl.engine.refit.row_scales import RowScales


Extents = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # global rows and columns of each box
MAX_NAMED = 3  # tensors that a message names


class ChecksumMismatch(Exception):
    """The engine's weights differ from the actor's."""

    exit_code = CHECKSUM


class _Region(NamedTuple):
    """A rectangle of a tensor, and the total that it counts towards."""

    tensor: str
    box: Box
    total: int


class Verifier:
    """Compares each weight of each rank's engine with the actor's.

    There is one total per weight and part of it that some destination rank holds. On the source each element is counted
    by the first rank that holds it, after rounding to `dtype`; one reduction over `comm`, the ranks of the refit, gives
    all ranks the expected totals. `scratch_bytes` bounds temporary memory. A weight with `scales` is quantised on both
    sides, and the totals are of its dequantised numbers, in fp32: of what the engine computes with.
    """

    def __init__(
        self,
        resharding: Resharding,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        rank: int,
        dtype: torch.dtype,
        scratch_bytes: int,
        scales: RowScales | None = None,
    ) -> None:
        self._layouts = (resharding.source, resharding.destination)
        self._comm, self._ranks, self._dtype, self._scratch_bytes = comm, ranks, dtype, scratch_bytes
        self._scales = scales
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

    def check(self, source: Weights, destination: Buffers) -> None:
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

    def _sum(self, regions: list[_Region], weights: Buffers) -> np.ndarray:
        """uint64 (totals,)."""
        sums: dict[torch.device, Tensor] = {}
        for part in regions:
            tensor, (_, (first_col, _), *_) = weights[part.tensor], part.box
            if tensor.device not in sums:
                sums[tensor.device] = torch.zeros(self._num_totals, dtype=torch.int64, device=tensor.device)
            total = sums[tensor.device][part.total]
            for first_row, values, dtype in self._values(part, tensor):
                add_checksum(total, values, first_row, first_col, dtype, self._scratch_bytes)
        totals = torch.zeros(self._num_totals, dtype=torch.int64)
        for of_device in sums.values():
            totals += of_device.cpu()
        return totals.numpy().view(np.uint64)

    def _values(self, part: _Region, weight: Tensor | Fp8Matrix) -> Iterator[tuple[int, Tensor, torch.dtype]]:
        """Yield values (rows, cols) of a region, the global number of their first row, and the dtype to round them to;
        of a quantised weight some rows at a time."""
        (top, bottom), (left, right), row, col = part.box
        rows, cols = bottom - top, right - left
        own, scales = weight, None if self._scales is None else self._scales.of(part.tensor, top, bottom)
        if isinstance(own, Tensor):
            own = own.view(own.size(0), -1)[row : row + rows, col : col + cols]
            if scales is None:
                yield top, own, self._dtype
                return
            scales = scales.to(own.device)
        step = max(1, self._scratch_bytes // (SCRATCH_PER_ELEMENT * cols))
        for first in range(0, rows, step):
            end = min(first + step, rows)
            if isinstance(own, Fp8Matrix):
                matrix = own.part(row + first, end - first, col, cols)
            else:
                assert scales is not None
                matrix = Fp8Matrix.of(own[first:end], scales[first:end], self._dtype)
            yield top + first, matrix.dequantized(torch.float32), torch.float32

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
    part = held.within(other.global_rows, other.global_cols)
    return None if part is None else _Region(tensor, part, total)


def _described(layout: Layout) -> str:
    sizes = " ".join(
        f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "ep", "vpp") if getattr(layout, axis) > 1
    )
    return f"({sizes or 'whole'}, {format_ranks(layout.ranks)})"
