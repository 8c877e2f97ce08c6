"""Columns as tensors, as losses take them: on the CPU in the memory of the column, on a GPU as a copy.

torch is imported when a tensor is made: a batch is handled on login nodes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hpcrl.batch.data_proto import DataProto
    from hpcrl.batch.ragged import Ragged


@dataclass(frozen=True, eq=False)
class TensorColumn:
    """Rows of different lengths, end to end. values: (sum of lengths,), on any device; lengths: int64 (N,), on the
    host, so that padding does not wait for the device."""

    values: Tensor
    lengths: np.ndarray

    @classmethod
    def of(cls, column: Ragged, device: torch.device | None = None) -> TensorColumn:
        """`column` on `device`; None: on the CPU."""
        import torch

        values = torch.from_numpy(column.values)
        return cls(values if device is None else values.to(device), column.lengths)

    def padded(self, fill: float = 0) -> Tensor:
        """Right-padded rows (N, longest row), in memory of their own, on the device of the values."""
        import torch

        size, longest = len(self.lengths), int(self.lengths.max(initial=0))
        starts = self.lengths.cumsum() - self.lengths
        places = np.arange(len(self.values)) + np.repeat(np.arange(size) * longest - starts, self.lengths)
        device = self.values.device
        out = torch.full((size * longest,), fill, dtype=self.values.dtype, device=device)
        return out.index_copy_(0, torch.from_numpy(places).to(device), self.values).view(size, longest)

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


class TensorBatch:
    """The samples of a micro-batch as a loss takes them. tokens: its token-level columns, on one device; samples and
    meta_info: those of the batch, on the host."""

    def __init__(self, batch: DataProto, device: torch.device) -> None:
        names = [name for name in batch.tokens if name != "pictures"]  # which are for the model only
        self.tokens = {name: TensorColumn.of(batch.fetch(name), device) for name in names}
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
