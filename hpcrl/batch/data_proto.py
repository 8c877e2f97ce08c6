"""`DataProto`: the columns of a set of samples, on this rank or on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from hpcrl.batch.pictures import PictureColumn
from hpcrl.batch.ragged import Ragged, Rows, TensorColumn, padded_places, row_index, to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RemoteColumn(Protocol):
    """A token-level column whose values are on other ranks. Rank 0 has only their locations."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> RemoteColumn: ...

    def concat(self, others: Sequence[RemoteColumn]) -> RemoteColumn:
        """This column's rows followed by those of the others."""
        ...

    def fetch(self) -> LocalColumn:
        """Copy the values to this rank."""
        ...


PICTURES = "pictures"  # the column that holds a PictureColumn
LocalColumn: TypeAlias = Ragged | PictureColumn
AnyColumn: TypeAlias = LocalColumn | RemoteColumn
Columns: TypeAlias = dict[str, AnyColumn]


@dataclass(eq=False)
class DataProto:
    """N samples as columns, in the manner of verl's DataProto. All methods but `pop` return a new object; columns that
    they do not change are shared with it.

    tokens: name -> `Ragged`, a row of values per sample, or a `RemoteColumn`, whose values are on other ranks.
    samples: name -> array (N, ...), an entry per sample. meta_info: facts about the whole batch, such as step; its
    key "metrics" is special, see `metrics`. The names of token-level and sample-level columns are distinct.
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

    def __len__(self) -> int:
        for column in self.tokens.values():
            return len(column)
        for array in self.samples.values():
            return len(array)
        return 0

    @property
    def names(self) -> list[str]:
        """Names of all columns, token-level ones first."""
        return [*self.tokens, *self.samples]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metric dicts in meta_info. A batch from one worker has one dict; `union` and `concat` list those of all."""
        found = self.meta_info.get("metrics", [])
        return list(found) if isinstance(found, list) else [found]

    def select(self, names: Iterable[str]) -> DataProto:
        """Only the named columns, with all of meta_info. KeyError for an unknown name."""
        names = list(names)
        self._check_known(names)
        return DataProto(
            {name: self.tokens[name] for name in names if name in self.tokens},
            {name: self.samples[name] for name in names if name in self.samples},
            dict(self.meta_info),
        )

    def pop(self, names: Iterable[str]) -> DataProto:
        """Remove the named columns from this batch and return them. KeyError for an unknown name."""
        names = list(names)
        popped = self.select(names)
        for name in names:
            self.tokens.pop(name, None)
            self.samples.pop(name, None)
        return popped

    def rename(self, old: str, new: str) -> DataProto:
        """Column `old` under the name `new`, in the same place. ValueError if there is a column `new`."""
        self._check_known([old])
        if new != old and new in self.names:
            raise ValueError(f"cannot rename column {old!r} to {new!r}: that column exists; pop it first")
        return DataProto(
            {new if name == old else name: column for name, column in self.tokens.items()},
            {new if name == old else name: column for name, column in self.samples.items()},
            dict(self.meta_info),
        )

    def union(self, other: DataProto) -> DataProto:
        """Columns and meta_info of both, for the same samples in the same order. ValueError if a column or a key that
        both have differs."""
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
        """The samples of all parts, in order. All parts have the same columns; meta_info is joined as by `union`."""
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
        """The given rows, integers (M,), in the given order; rows may repeat or be left out."""
        index, size = row_index(rows), len(self)
        if index.size and not (-size <= index.min() and index.max() < size):
            raise IndexError(f"rows from {index.min()} to {index.max()} of a batch of {size} samples")
        index = np.where(index < 0, index + size, index)
        return DataProto(
            {name: column.take(index) for name, column in self.tokens.items()},
            {name: array[index] for name, array in self.samples.items()},
            dict(self.meta_info),
        )

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Each sample n times: a a b b if `interleave`, else a b a b."""
        rows = np.arange(len(self))
        return self.reorder(np.repeat(rows, n) if interleave else np.tile(rows, n))

    def __getitem__(self, rows: int | slice | Rows) -> DataProto:
        """The chosen samples as a batch: by a number, a slice, several numbers, or a bool mask (N,)."""
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
        """n consecutive parts whose sizes differ by at most 1, the larger ones first. Unlike in verl, n need not divide
        the number of samples, and parts may be empty."""
        if n < 1:
            raise ValueError(f"chunk into {n} parts; expected at least 1")
        return [self.reorder(rows) for rows in np.array_split(np.arange(len(self)), n)]

    def padded(self, name: str, fill: float = 0) -> torch.Tensor:
        """A token-level column of this rank, right-padded: a tensor (N, longest row) on the CPU."""
        column = self._token_level(name)
        if not isinstance(column, Ragged):
            raise ValueError(f"column {name!r} is on other ranks; call fetch({name!r}).padded() to copy it to this one")
        return column.padded(fill)

    def fetch(self, name: str) -> Ragged:
        """A token-level column, copied to this rank if it is on others."""
        found = self.local(name)
        assert isinstance(found, Ragged)
        return found

    def local(self, name: str) -> LocalColumn:
        """As `fetch`, also of pictures."""
        column = self._token_level(name)
        return column if isinstance(column, LocalColumn) else column.fetch()

    @property
    def pictures(self) -> PictureColumn | None:
        """The column `pictures`, copied to this rank if it is on others; None without one."""
        found = self.local(PICTURES) if PICTURES in self.tokens else None
        assert found is None or isinstance(found, PictureColumn)
        return found

    def _token_level(self, name: str) -> AnyColumn:
        if name not in self.tokens:
            raise KeyError(f"no token-level column {name!r}; there are {sorted(self.tokens)}")
        return self.tokens[name]

    def _check_known(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.tokens and name not in self.samples:
                raise KeyError(f"no column {name!r}; there are {sorted(self.names)}")


def same(a: Any, b: Any) -> bool:
    """Deep equality of columns, arrays and plain containers, with NaN equal to NaN."""
    if a is b:
        return True
    if isinstance(a, LocalColumn):
        return a.equal(b)
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


def _joined_meta(parts: Sequence[DataProto], action: str) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for part in parts:
        for key, value in part.meta_info.items():
            if key != "metrics" and key in meta and not same(meta[key], value):
                raise ValueError(f"{action}: meta_info[{key!r}] is {meta[key]!r} and {value!r}; expected equal values")
            meta[key] = value
    metrics = [metric for part in parts for metric in part.metrics]
    return meta | {"metrics": metrics} if "metrics" in meta else meta


def _concat_tokens(name: str, columns: Sequence[AnyColumn]) -> AnyColumn:
    for kind in (Ragged, PictureColumn):
        if all(isinstance(column, kind) for column in columns):
            return kind.concat(columns)  # type: ignore[arg-type]
    if any(isinstance(column, LocalColumn) for column in columns):
        raise ValueError(f"column {name!r} is on this rank in one batch and on others in another; fetch it first")
    remote = cast("Sequence[RemoteColumn]", columns)
    return remote[0].concat(remote[1:])


FOR_MODEL = ("pictures", "routed_experts", "sequence_starts")  # columns that losses do not take
NOT_RECORDED = -1  # in routed_experts, in place of an expert's number: no choice was recorded, the router chooses


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
