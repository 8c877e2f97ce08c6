"""A column at rest: rows of different lengths, end to end, with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

Rows: TypeAlias = Sequence[int] | np.ndarray | torch.Tensor


def row_index(rows: Rows) -> torch.Tensor:
    """Row numbers of any integer kind as an int64 CPU tensor (M,)."""
    index = torch.as_tensor(np.asarray(rows)) if not isinstance(rows, torch.Tensor) else rows
    if index.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if index.dtype == torch.bool or index.is_floating_point() or index.dim() != 1:
        raise TypeError(f"rows are {index.dtype} of shape {tuple(index.shape)}; expected integers of shape (M,)")
    return index.to(device="cpu", dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """N rows of one dtype; row i is `values[offsets[i] : offsets[i + 1]]`.

    values: (sum of lengths,), of a column at rest on the CPU. offsets: int64 (N + 1,) on the CPU, from 0 upwards.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        if values.dim() != 1 or offsets.dim() != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
            raise ValueError(
                f"values have shape {tuple(values.shape)}, offsets {tuple(offsets.shape)} {offsets.dtype}; "
                "expected (tokens,) and int64 (rows + 1,)"
            )
        if offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                f"offsets go from {int(offsets[0])} to {int(offsets[-1])} for {len(values)} values; "
                "expected 0 to the number of values, never falling"
            )

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """Rows that already lie end to end; lengths: integers (N,)."""
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """Rows given one by one as 1-D tensors; dtype None takes the first row's."""
        if not rows:
            return cls.from_lengths(torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=torch.int64))
        values = torch.cat([row.detach().cpu() for row in rows]).to(dtype or rows[0].dtype)
        return cls.from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    @classmethod
    def from_padded(cls, padded: torch.Tensor, lengths: Rows) -> Ragged:
        """Right-padded rows (N, T) and their lengths (N,)."""
        padded = padded.detach().cpu()
        size = row_index(lengths)
        if padded.dim() != 2 or len(size) != len(padded) or bool(((size < 0) | (size > padded.shape[1])).any()):
            raise ValueError(
                f"padded has shape {tuple(padded.shape)} and there are {len(size)} lengths up to "
                f"{int(size.max()) if len(size) else 0}; expected (N, T) and N lengths from 0 to T"
            )
        return cls.from_lengths(padded[_inside(size, padded.shape[1])], size)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order; they must have one dtype."""
        if not parts:
            raise ValueError("nothing to concatenate; expected at least one column")
        dtypes = {part.values.dtype for part in parts}
        if len(dtypes) > 1:
            raise ValueError(f"columns of {sorted(map(str, dtypes))} cannot be concatenated; expected one dtype")
        return cls.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """int64 (N,)"""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def row(self, i: int) -> torch.Tensor:
        """Row i as a view (length,); negative i counts from the end."""
        size = len(self)
        if not -size <= i < size:
            raise IndexError(f"row {i} of a column of {size} rows")
        i %= size
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: Rows) -> Ragged:
        """The given rows in the given order, repeats allowed, as a copy."""
        index = row_index(rows)
        lengths, starts = self.lengths[index], self.offsets[:-1][index]
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
        return Ragged.from_lengths(self.values[torch.arange(len(shift)) + shift], lengths)

    def to(self, device: torch.device) -> Ragged:
        """With its values on another device; the offsets stay on the CPU."""
        return self if self.values.device == device else Ragged(self.values.to(device), self.offsets)

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Right-padded rows (N, longest row), on the device of the values."""
        longest = int(self.lengths.max()) if len(self) else 0
        device = self.values.device
        out = torch.full((len(self), longest), fill, dtype=self.dtype, device=device)
        inside = _inside(self.lengths, longest)
        if device.type == "cpu":
            out[inside] = self.values
        else:  # a mask on the device would have its trues counted there, which waits for all that runs
            out.view(-1).index_copy_(0, inside.view(-1).nonzero().squeeze(1).to(device), self.values)
        return out

    def padded_vectors(self, width: int) -> torch.Tensor:
        """Right-padded rows of a column that holds `width` numbers per token, end to end: (N, longest row, width)."""
        uneven = self.lengths % width
        if bool(uneven.any()):
            raise ValueError(
                f"row {int(uneven.argmax())} has {int(self.lengths[uneven.argmax()])} values; expected a multiple of "
                f"{width}, the numbers per token"
            )
        padded = self.padded()
        return padded.view(len(self), padded.shape[1] // width, width)

    def equal(self, other: object) -> bool:
        """Same rows, same dtype, bit for bit up to NaN == NaN."""
        if not isinstance(other, Ragged) or self.dtype != other.dtype or not torch.equal(self.offsets, other.offsets):
            return False
        if self.dtype.is_floating_point:
            return bool(((self.values == other.values) | (self.values.isnan() & other.values.isnan())).all())
        return torch.equal(self.values, other.values)


def _inside(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """bool (N, width): True where a padded row holds a value."""
    return torch.arange(width)[None, :] < lengths[:, None]
