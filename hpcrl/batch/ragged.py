"""`Ragged`: a token-level column at rest, rows of different lengths in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hpcrl.batch.tensors import TensorColumn

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike

Rows: TypeAlias = Sequence[int] | np.ndarray


def row_index(rows: Rows) -> np.ndarray:
    """Row numbers of any integer kind as int64 (M,)."""
    index = np.asarray(rows)
    if index.size == 0:
        return np.zeros(0, np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise TypeError(f"rows are {index.dtype} of shape {index.shape}; expected integers of shape (M,)")
    return index.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """N rows of one dtype, end to end; row i is `values[offsets[i] : offsets[i + 1]]`.

    values: (sum of lengths,), usually float32, int32 or int16. offsets: int64 (N + 1,), from 0 upwards.
    `padded` returns a tensor on the CPU; `hpcrl.batch.tensors` has the columns of a micro-batch on a GPU.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        if not isinstance(values, np.ndarray) or not isinstance(offsets, np.ndarray):
            raise TypeError(
                f"values are a {type(values).__name__}, offsets a {type(offsets).__name__}; expected numpy arrays"
            )
        if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) == 0:
            raise ValueError(
                f"values have shape {values.shape}, offsets {offsets.shape} {offsets.dtype}; "
                "expected (tokens,) and int64 (rows + 1,)"
            )
        if offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                f"offsets go from {offsets[0]} to {offsets[-1]} for {len(values)} values; "
                "expected 0 to the number of values, never falling"
            )

    @classmethod
    def from_lengths(cls, values: ArrayLike, lengths: Rows) -> Ragged:
        """Rows that are end to end already, not copied if `values` is an array. lengths: integers (N,)."""
        size = row_index(lengths)
        offsets = np.zeros(len(size) + 1, np.int64)
        np.cumsum(size, out=offsets[1:])
        return cls(np.asarray(values), offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[ArrayLike], dtype: DTypeLike | None = None) -> Ragged:
        """Rows given one by one, arrays or lists (length,); dtype None takes the first row's."""
        arrays = [np.asarray(row, dtype) for row in rows]
        if not arrays:
            return cls.from_lengths(np.zeros(0, dtype or np.float32), [])
        values = np.concatenate(arrays).astype(arrays[0].dtype, copy=False)
        return cls.from_lengths(values, [len(array) for array in arrays])

    @classmethod
    def from_padded(cls, padded: torch.Tensor, lengths: Rows) -> Ragged:
        """Right-padded rows, a tensor (N, T) on any device, and their lengths (N,)."""
        array = padded.detach().cpu().numpy()
        size = row_index(lengths)
        if array.ndim != 2 or len(size) != len(array) or bool(((size < 0) | (size > array.shape[1])).any()):
            raise ValueError(
                f"padded has shape {array.shape} and there are {len(size)} lengths up to "
                f"{size.max() if len(size) else 0}; expected (N, T) and N lengths from 0 to T"
            )
        return cls.from_lengths(array[np.arange(array.shape[1]) < size[:, None]], size)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order; they must have one dtype."""
        if not parts:
            raise ValueError("nothing to concatenate; expected at least one column")
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise ValueError(f"columns of {sorted(map(str, dtypes))} cannot be concatenated; expected one dtype")
        return cls.from_lengths(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 (N,)"""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def row(self, i: int) -> np.ndarray:
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
        ends = lengths.cumsum()
        shift = np.repeat(starts - (ends - lengths), lengths)
        return Ragged.from_lengths(self.values[np.arange(len(shift)) + shift], lengths)

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Right-padded rows (N, longest row), a tensor on the CPU."""
        return TensorColumn.of(self).padded(fill)

    def padded_vectors(self, width: int) -> torch.Tensor:
        """Right-padded rows of a column that holds `width` numbers per token, end to end: (N, longest row, width)."""
        return TensorColumn.of(self).padded_vectors(width)

    def equal(self, other: object) -> bool:
        """Same rows, same dtype, bit for bit up to NaN == NaN."""
        if not isinstance(other, Ragged) or self.dtype != other.dtype:
            return False
        if not np.array_equal(self.offsets, other.offsets):
            return False
        return np.array_equal(self.values, other.values, equal_nan=self.dtype.kind == "f")
