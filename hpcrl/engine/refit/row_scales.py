"""The scales of weights that an engine holds in 8 bits: of whole rows, whatever part of a row a rank has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.engine.refit.messages import Buffers, Weights
from hpcrl.engine.refit.pieces import ShardGroup
from hpcrl.kernels.fp8_matrix import TEMPORARY_BYTES, Fp8Matrix, row_scales
from hpcrl.model.blocks.block import Box
from hpcrl.runtime.mpi import wait

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.engine.refit.planner import Resharding


class RowScales:
    """One fp32 scale for each row of the weights `names`, on every rank of `comm`, the refit's.

    Args:
        dtype: dtype of the values that are quantised.
    """

    def __init__(
        self, resharding: Resharding, comm: MPI.Intracomm, rank: int, dtype: torch.dtype, names: Collection[str]
    ) -> None:
        self._comm, self._dtype = comm, dtype
        self._held, self._needed = (
            _boxes(groups, rank, names) for groups in (resharding.source_groups, resharding.destination_groups)
        )
        rows = {
            shard.name: shard.global_shape[0]
            for group in resharding.destination_groups
            for shard in group.shards
            if shard.name in names
        }
        self._first, self._num_rows = dict[str, int](), 0
        for name, count in rows.items():
            self._first[name] = self._num_rows
            self._num_rows += count

    def update(self, source: Weights, destination: Buffers) -> None:
        """Find the scales of `source`, and set those of `destination`. Collective."""
        from mpi4py import MPI

        amax = torch.zeros(self._num_rows)
        for (local_name, name), boxes in self._held.items():
            weight = source[local_name]  # merged adapters are computed at each access
            for (top, bottom), (left, right), row, col in boxes:
                values = weight[row : row + bottom - top, col : col + right - left]
                largest = torch.linalg.vector_norm(values, torch.inf, 1).to(self._dtype).float().cpu()
                place = self._of(amax, name, top, bottom)
                torch.maximum(place, largest, out=place)
        wait(self._comm.Iallreduce(MPI.IN_PLACE, amax.numpy(), MPI.MAX))
        self._scales = row_scales(amax)
        for (local_name, name), boxes in self._needed.items():
            matrix = destination[local_name]
            assert isinstance(matrix, Fp8Matrix)
            for (top, bottom), _, row, _ in boxes:
                matrix.scales[row : row + bottom - top, 0] = self._of(self._scales, name, top, bottom)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for scales, and for quantising, at most."""
        return 2 * 4 * self._num_rows + TEMPORARY_BYTES

    def of(self, name: str, top: int, bottom: int) -> Tensor | None:
        """Return the scales of rows of a weight (rows, 1), on the host; None if the engine has it in `dtype`."""
        return self._of(self._scales, name, top, bottom)[:, None] if name in self._first else None

    def _of(self, rows: Tensor, name: str, top: int, bottom: int) -> Tensor:
        first = self._first[name]
        return rows[first + top : first + bottom]


def _boxes(groups: list[ShardGroup], rank: int, names: Collection[str]) -> dict[tuple[str, str], list[Box]]:
    """Return what a rank has of the weights `names`, by local and global names."""
    found: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for group in groups:
        for shard in group.shards if rank in group.ranks else ():
            if shard.name in names:
                found[shard.local_name, shard.name] += shard.boxes
    return found
