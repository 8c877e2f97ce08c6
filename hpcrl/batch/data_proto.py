"""`DataProto`: the columns of a set of samples, some here, some on other ranks."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch

from hpcrl.batch.ragged import Ragged, Rows


class RemoteColumn(Protocol):
    """A token-level column whose values lie on other ranks; what rank 0 holds of it is where."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> RemoteColumn: ...

    def concat(self, others: Sequence[RemoteColumn]) -> RemoteColumn:
        """This column's rows followed by those of the others."""
        ...

    def fetch(self) -> Ragged:
        """Brings the values here."""
        ...


Columns: TypeAlias = dict[str, Ragged | RemoteColumn]


@dataclass(eq=False)
class DataProto:
    """Columns of equal length. Every method but `pop` leaves the object as it is and returns a new one.

    tokens: name -> one row of values per sample. samples: name -> array (N, ...), one entry per sample.
    meta_info: facts about the whole; its key "metrics" is special, see `metrics`.
    """

    tokens: Columns = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = self.tokens.keys() & self.samples.keys()
        if both:
            raise ValueError(f"column {min(both)!r} is both token-level and sample-level; give one another name")
        sizes = {name: len(column) for name, column in [*self.tokens.items(), *self.samples.items()]}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns have different lengths: {sizes}; expected one entry per sample in each")

    @classmethod
    def from_dict(
        cls,
        tokens: Mapping[str, Ragged | RemoteColumn | Sequence[Any]] | None = None,
        samples: Mapping[str, np.ndarray | torch.Tensor | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Also takes plain lists: of rows (tensors or lists) for tokens, of entries for samples."""
        return cls(
            {name: _token_column(column) for name, column in (tokens or {}).items()},
            {name: _sample_column(column) for name, column in (samples or {}).items()},
            dict(meta_info or {}),
        )

    def __len__(self) -> int:
        for column in self.tokens.values():
            return len(column)
        for array in self.samples.values():
            return len(array)
        return 0

    @property
    def names(self) -> list[str]:
        return [*self.tokens, *self.samples]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metric dicts that came with this batch. A part holds one dict; `union` and `concat` list those of all."""
        found = self.meta_info.get("metrics", [])
        return list(found) if isinstance(found, list) else [found]

    def select(self, names: Iterable[str]) -> DataProto:
        """Only the named columns."""
        names = list(names)
        self._check_known(names)
        return DataProto(
            {name: self.tokens[name] for name in names if name in self.tokens},
            {name: self.samples[name] for name in names if name in self.samples},
            dict(self.meta_info),
        )

    def pop(self, names: Iterable[str]) -> DataProto:
        """Removes the named columns from this batch and returns them."""
        names = list(names)
        popped = self.select(names)
        for name in names:
            self.tokens.pop(name, None)
            self.samples.pop(name, None)
        return popped

    def rename(self, old: str, new: str) -> DataProto:
        self._check_known([old])
        if new != old and new in self.names:
            raise ValueError(f"cannot rename column {old!r} to {new!r}: that column exists; pop it first")
        return DataProto(
            {new if name == old else name: column for name, column in self.tokens.items()},
            {new if name == old else name: column for name, column in self.samples.items()},
            dict(self.meta_info),
        )

    def union(self, other: DataProto) -> DataProto:
        """Columns and meta info of both. What both have must be equal."""
        if self.names and other.names and len(self) != len(other):
            raise ValueError(f"union of {len(self)} samples with {len(other)}; expected equally many")
        for kind, mine, theirs in (
            ("token-level column", self.tokens, other.tokens),
            ("sample-level column", self.samples, other.samples),
        ):
            for name in mine.keys() & theirs.keys():
                if not same(mine[name], theirs[name]):  # type: ignore[index]
                    raise ValueError(f"{kind} {name!r} is in both batches with different values; pop or rename one")
        return DataProto(self.tokens | other.tokens, self.samples | other.samples, _joined_meta([self, other], "union"))

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """The samples of all parts, in order; all have the same columns and meta info ("metrics" are listed)."""
        if not parts:
            raise ValueError("nothing to concatenate; expected at least one batch")
        first = parts[0]
        for part in parts:
            if part.tokens.keys() != first.tokens.keys() or part.samples.keys() != first.samples.keys():
                raise ValueError(f"batches have columns {first.names} and {part.names}; expected the same in all")
        if len(parts) == 1:
            return DataProto(dict(first.tokens), dict(first.samples), dict(first.meta_info))
        return cls(
            {name: _concat_tokens(name, [part.tokens[name] for part in parts]) for name in first.tokens},
            {name: np.concatenate([part.samples[name] for part in parts]) for name in first.samples},
            _joined_meta(parts, "concat"),
        )

    def reorder(self, rows: Rows) -> DataProto:
        """The given rows in the given order; rows may repeat or be left out."""
        index = np.asarray(rows)
        if index.size == 0:
            index = np.zeros(0, dtype=np.int64)
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise TypeError(f"rows are {index.dtype} of shape {index.shape}; expected integers of shape (M,)")
        size = len(self)
        if index.size and not (-size <= index.min() and index.max() < size):
            raise IndexError(f"rows from {index.min()} to {index.max()} of a batch of {size} samples")
        index = np.where(index < 0, index + size, index).astype(np.int64)
        return DataProto(
            {name: column.take(index) for name, column in self.tokens.items()},
            {name: array[index] for name, array in self.samples.items()},
            dict(self.meta_info),
        )

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Each sample n times: a a b b if interleave, else a b a b."""
        rows = np.arange(len(self))
        return self.reorder(np.repeat(rows, n) if interleave else np.tile(rows, n))

    def slice(self, start: int | None, stop: int | None) -> DataProto:
        """Samples start to stop, counted as Python's slices do."""
        return self[start:stop]

    def __getitem__(self, rows: int | builtins.slice | Rows) -> DataProto:
        """A batch of the chosen samples: one number, a slice, numbers, or a bool mask (N,)."""
        if isinstance(rows, slice):
            return self.reorder(np.arange(len(self))[rows])
        if isinstance(rows, int | np.integer):
            return self.reorder([int(rows)])
        index = np.asarray(rows)
        if index.dtype == np.bool_:
            if index.shape != (len(self),):
                raise IndexError(f"mask of shape {index.shape} for {len(self)} samples; expected ({len(self)},)")
            index = np.flatnonzero(index)
        return self.reorder(index)

    def chunk(self, n: int) -> list[DataProto]:
        """n consecutive parts whose sizes differ by at most 1, the larger ones first; parts may be empty."""
        if n < 1:
            raise ValueError(f"chunk into {n} parts; expected at least 1")
        return [self.reorder(rows) for rows in np.array_split(np.arange(len(self)), n)]

    def padded(self, name: str, fill: float = 0) -> torch.Tensor:
        """A local token-level column, right-padded: (N, longest row)."""
        column = self._token_level(name)
        if not isinstance(column, Ragged):
            raise ValueError(f"column {name!r} lies on other ranks; call fetch({name!r}).padded() to bring it here")
        return column.padded(fill)

    def to(self, device: torch.device) -> DataProto:
        """With the values of its local token-level columns on another device, for a loss to compute there."""
        columns = {
            name: column.to(device) if isinstance(column, Ragged) else column for name, column in self.tokens.items()
        }
        return DataProto(columns, self.samples, self.meta_info)

    def fetch(self, name: str) -> Ragged:
        """A token-level column, brought here if it lies on other ranks."""
        column = self._token_level(name)
        return column if isinstance(column, Ragged) else column.fetch()

    def equal(self, other: DataProto) -> bool:
        """Same columns in whatever order, same values, same meta info."""
        return (
            same(self.tokens, other.tokens)
            and same(self.samples, other.samples)
            and same(self.meta_info, other.meta_info)
        )

    def _token_level(self, name: str) -> Ragged | RemoteColumn:
        if name not in self.tokens:
            raise KeyError(f"no token-level column {name!r}; there are {sorted(self.tokens)}")
        return self.tokens[name]

    def _check_known(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.tokens and name not in self.samples:
                raise KeyError(f"no column {name!r}; there are {sorted(self.names)}")


def same(a: Any, b: Any) -> bool:
    """Deep equality of columns, arrays, tensors and plain containers, with NaN equal to NaN."""
    if a is b:
        return True
    if isinstance(a, Ragged):
        return a.equal(b)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same(_numpy(a), _numpy(b))
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or a.shape != b.shape:
            return False
        if a.dtype == object or b.dtype == object:
            return all(map(same, a.ravel().tolist(), b.ravel().tolist()))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return bool(a == b)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _joined_meta(parts: Sequence[DataProto], action: str) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for part in parts:
        for key, value in part.meta_info.items():
            if key != "metrics" and key in meta and not same(meta[key], value):
                raise ValueError(f"{action}: meta_info[{key!r}] is {meta[key]!r} and {value!r}; expected equal values")
            meta[key] = value
    metrics = [metric for part in parts for metric in part.metrics]
    return meta | {"metrics": metrics} if "metrics" in meta else meta


def _concat_tokens(name: str, columns: Sequence[Ragged | RemoteColumn]) -> Ragged | RemoteColumn:
    local = [isinstance(column, Ragged) for column in columns]
    if all(local):
        return Ragged.concat(cast("Sequence[Ragged]", columns))
    if any(local):
        raise ValueError(f"column {name!r} is here in one batch and on other ranks in another; fetch it first")
    remote = cast("Sequence[RemoteColumn]", columns)
    return remote[0].concat(remote[1:])


def _token_column(column: Ragged | RemoteColumn | Sequence[Any]) -> Ragged | RemoteColumn:
    if isinstance(column, list | tuple):
        return Ragged.from_rows([torch.as_tensor(row) for row in column])
    return cast("Ragged | RemoteColumn", column)


def _sample_column(column: np.ndarray | torch.Tensor | Sequence[Any]) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, torch.Tensor):
        return _numpy(column)
    if all(isinstance(entry, bool | int | float | np.generic) for entry in column):
        return np.asarray(column)
    array = np.empty(len(column), dtype=object)
    array[:] = column
    return array
