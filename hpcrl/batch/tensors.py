"""Columns as tensors, as losses take them: on the CPU in the memory of the column, on a GPU as a copy, made in one
transfer.

torch is imported when a tensor is made: a batch is handled on login nodes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.batch.transfer import to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hpcrl.batch.data_proto import DataProto
    from hpcrl.batch.ragged import Ragged


@dataclass(frozen=True, eq=False)
class TensorColumn:
    """Rows of different lengths, end to end. Both (sum of lengths,), on one device: values; places int64, where the
    values are in padded rows. lengths: int64 (N,), on the host, so that padding does not wait for the device."""

    values: Tensor
    places: Tensor
    lengths: np.ndarray

    @classmethod
    def of(cls, column: Ragged) -> TensorColumn:
        """`column` on the CPU."""
        import torch

        return cls(torch.from_numpy(column.values), padded_places(column.lengths), column.lengths)

    def padded(self, fill: float = 0) -> Tensor:
        """Right-padded rows (N, longest row), in memory of their own, on the device of the values."""
        import torch

        size, longest = len(self.lengths), int(self.lengths.max(initial=0))
        out = torch.full((size * longest,), fill, dtype=self.values.dtype, device=self.values.device)
        return out.index_copy_(0, self.places, self.values).view(size, longest)

    def padded_vectors(self, width: int) -> Tensor:
        """Right-padded rows of a column that holds `width` numbers per token, end to end: (N, longest row, width)."""
        uneven = self.lengths % width
        if uneven.any():
            row = int(uneven.argmax())
            raise ValueError(
                f"row {row} has {self.lengths[row]} values; expected a multiple of {width}, the numbers per token"
            )
        padded = self.padded()
        return padded.view(len(padded), padded.shape[1] // width, width)


def padded_places(lengths: np.ndarray) -> Tensor:
    """Return the places of rows of these lengths, end to end, in right-padded rows: int64 (sum of lengths,)."""
    import torch

    longest, starts = int(lengths.max(initial=0)), lengths.cumsum() - lengths
    return torch.from_numpy(np.arange(lengths.sum()) + np.repeat(np.arange(len(lengths)) * longest - starts, lengths))


FOR_MODEL = ("pictures", "routed_experts")  # columns that losses do not take


class TensorBatch:
    """The samples of a micro-batch as a loss takes them. tokens: its token-level columns, on one device; samples and
    meta_info: those of the batch, on the host."""

    def __init__(self, batch: DataProto, device: torch.device) -> None:
        import torch

        columns = {name: batch.fetch(name) for name in batch.tokens if name not in FOR_MODEL}
        lengths = {column.lengths.tobytes(): column.lengths for column in columns.values()}
        values = [torch.from_numpy(column.values) for column in columns.values()]
        copies = to_device([*values, *map(padded_places, lengths.values())], device)
        places = dict(zip(lengths, copies[len(values) :], strict=True))
        self.tokens = {
            name: TensorColumn(copy, places[column.lengths.tobytes()], column.lengths)
            for (name, column), copy in zip(columns.items(), copies[: len(values)], strict=True)
        }
        self.samples = batch.samples
        self.meta_info = batch.meta_info

    def padded(self, name: str, fill: float = 0) -> Tensor:
        """A token-level column, right-padded: (N, longest row), on the batch's device."""
        if name not in self.tokens:
            raise KeyError(f"no token-level column {name!r}; there are {sorted(self.tokens)}")
        return self.tokens[name].padded(fill)


def training_mask(batch: DataProto | TensorBatch) -> torch.Tensor:
    """fp32 (N, longest response): 1 on the tokens that count, those that the model wrote without those rejected."""
    return batch.padded("loss_mask" if "loss_mask" in batch.tokens else "response_mask").float()


def padded_if_there(batch: DataProto | TensorBatch, name: str) -> torch.Tensor | None:
    """A column that only some jobs have, right-padded: (N, longest row)."""
    return batch.padded(name) if name in batch.tokens else None
