"""`Ragged`: a token-level column at rest, rows of different lengths in host memory; and columns as tensors.

Losses take tensors: on the CPU in the memory of the column, on a GPU as a copy, made in one transfer, for which the
host does not wait. torch is imported when a tensor is made: a batch is handled on login nodes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike
    from torch import Tensor


T = TypeVar("T")
ALIGNMENT = 16  # bytes, of each tensor in the transfer


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies on the device of host tensors; on the CPU the tensors themselves."""
    if device.type == "cpu":
        return list(tensors)
    import torch

    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    # A copy from pageable memory would wait for all work queued on the device.
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type != "meta")
    for place, tensor in zip(host.split(sizes), tensors, strict=True):
        place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


ON_HOST = {"on_host": True}  # metadata of fields that `moved` leaves as they are


def moved(value: T, device: torch.device) -> T:
    """Return a copy of nested dataclasses and tuples whose host tensors are on the device, copied in one transfer."""
    if device.type == "cpu":
        return value
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(value, collect)
    copies = iter(to_device(tensors, device))
    result: T = _mapped(value, lambda _: next(copies))
    return result


def _mapped(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy with `move` of each tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return move(value)
    if type(value) is tuple:
        return tuple(_mapped(each, move) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [one.name for one in fields(value) if one.init and not one.metadata.get("on_host")]
    return replace(value, **{name: _mapped(getattr(value, name), move) for name in names})


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
    `padded` returns a tensor on the CPU; a `TensorColumn` has the rows of a micro-batch on a GPU.
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
        """Rows that are end to end already, not copied if `values` is an array.

        Args:
            lengths: integers (N,).
        """
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
