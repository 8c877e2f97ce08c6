"""Rows of Parquet, JSON and Arrow files, and distribution of work over ranks."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.data.formats import FORMATS, READY, converted, recognised
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import read_json, writable

if TYPE_CHECKING:
    from hpcrl.runtime.world import World


Piece = TypeVar("Piece")
Result = TypeVar("Result")


def spread(world: World | None, pieces: Sequence[Piece], work: Callable[[Piece], Result]) -> list[Result]:
    """Return `work(piece)` for each piece, in order, on every rank. Collective over `world`.

    Each piece is processed by one rank, `world.size` pieces at a time, and its result is sent to the others, so that
    pickled results of one round only are in memory. Without a world, this process does all the work.

    Raises:
        InputError: on all ranks, if `work` raises a user error on any of them.
    """
    if world is None or world.size == 1:
        return _each(work, pieces)
    all_results: list[Result] = []
    for start in range(world.rank, world.rank + len(pieces), world.size):
        own_piece = pieces[start : start + 1]  # empty if the last round has no piece for this rank
        results = world.run_collectively(partial(_each, work, own_piece))
        all_results += [result for done in world.all_gather_object(results) for result in done]
    return all_results


def _each(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    return [work(piece) for piece in pieces]


PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json", ".jsonl.gz", ".json.gz")
ARROW_SUFFIXES = (".arrow",)
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a folder that `datasets` has saved
EXPECTED = "a Parquet or JSONL file, a JSON array, an Arrow file, or a folder that `datasets` has saved"
ROWS_PER_BATCH = 4096
ROWS_PER_CHUNK = 2**17  # of a table in memory
CACHE_BYTES = 2**28  # of row groups of a large column, per rank
NULL_KEYWORDS = ("const", "default")  # of a JSON schema: null is a value there

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Nulls:
    """Whether nulls of a type were written by their rows; otherwise they may be keys of other rows.

    A Parquet struct has the keys of all rows, and only a key without a value in any row is known to be written. fields:
    of a struct. inner: of the items of a list, or of the values of a map. A JSON value has neither.
    """

    are_written: bool
    fields: Mapping[str, Nulls] = field(default_factory=dict)
    inner: Nulls | None = None
    is_map: bool = False  # read as a list of (key, value)

    @classmethod
    def of(cls, kind: Any) -> Nulls:
        """Those of an Arrow type."""
        import pyarrow

        if pyarrow.types.is_struct(kind):
            return cls(False, {each.name: cls.of(each.type) for each in kind})
        if pyarrow.types.is_map(kind):
            return cls(False, inner=replace(cls.of(kind.item_type), are_written=True), is_map=True)
        if hasattr(kind, "value_type"):
            return cls(False, inner=cls.of(kind.value_type))
        return cls(pyarrow.types.is_null(kind))

    def __getitem__(self, name: str) -> Nulls:
        return self.fields.get(name) or self.inner or self


OF_JSON = Nulls(True)


def without_nulls(value: Any, nulls: Nulls = OF_JSON) -> Any:
    """The value without the null entries of its mappings, so that Parquet and JSON lines have the same values.

    Null items of lists stay, and so do `default: null` and `const: null` of a JSON schema that the row has written.
    """
    if nulls.is_map and isinstance(value, list):
        value = dict(value)
    if isinstance(value, dict):
        return {
            name: without_nulls(it, nulls[name])
            for name, it in value.items()
            if it is not None or (name in NULL_KEYWORDS and nulls[name].are_written)
        }
    return [without_nulls(it, nulls.inner or nulls) for it in value] if isinstance(value, list) else value


class RowFile:
    """One data file: `len(file)` rows, `file[i]` a dict, `file.column(name)` a list, `file.columns` the names.

    Values are as `without_nulls` returns them. A file of another tool also has the columns that its format adds.

    Args:
        large: columns that `file[i]` is without, and that stay in a Parquet file until rows are asked for, because
            every rank would hold them.
        form: the value of data.format.
    """

    def __init__(self, path: str, large: Collection[str] = (), form: str = "auto") -> None:
        self.path = path
        self._large = large
        self._rows: ArrowRows | list[dict[str, Any]]
        if is_saved_dataset(path) or suffix_of(path) in ARROW_SUFFIXES:
            self._rows = ArrowRows(*read_arrow(path))
            self.columns = self._rows.columns
        elif not os.path.isfile(path):
            kind = "a directory" if os.path.isdir(path) else "no such file"
            raise InputError(f"{path}: {kind}; expected {EXPECTED} (data.train_files, data.val_files)")
        elif suffix_of(path) in PARQUET_SUFFIXES:
            self._rows = ParquetRows(path, large)
            self.columns = self._rows.columns
        elif suffix_of(path) in JSON_SUFFIXES:
            names, self._rows = set[str](), []
            for number, row in read_rows(path):
                names.update(row)
                try:
                    self._rows.append(without_nulls(row))
                except RecursionError:
                    raise InputError(f"{path}:{number}: values are nested too deep; expected a row of data") from None
            self.columns = sorted(names)
        else:
            raise unknown_suffix(path)
        self._format = recognised(path, self.columns, form)
        self._added: tuple[str, ...] = ()
        if self._format != READY:
            self._added = FORMATS[self._format].adds
            log.info("%s: read as %s, which has the columns %s", path, self._format, ", ".join(self._added))
            self.columns = list(dict.fromkeys([*self.columns, *self._added]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = {name: it for name, it in self._rows[row].items() if name not in self._large}
        return values | converted(self.path, row, values, self._format) if self._added else values

    def selected(self, most: int, only: int | None) -> range:
        """Return the numbers of the first `most` rows (-1: all), or that of row `only`."""
        if only is None:
            return range(len(self) if most < 0 else min(len(self), most))
        if not 0 <= only < len(self):
            raise InputError(f"{self.path}: no row {only}; it has {len(self)} rows, which are counted from 0")
        return range(only, only + 1)

    def column(self, name: str, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return values of a column in rows [start, stop); None where a row lacks it."""
        if name in self._added:
            rows = range(len(self))[start:stop]
            own = zip(rows, self._own_rows(rows), strict=True)
            return [converted(self.path, row, values, self._format)[name] for row, values in own]
        if isinstance(self._rows, ArrowRows):
            return self._rows.column(name, start, stop)
        return [row.get(name) for row in self._rows[start:stop]]

    def _own_rows(self, rows: range) -> list[dict[str, Any]]:
        """Rows without the columns that the format adds; of a table by columns, which is faster than by rows."""
        if not isinstance(self._rows, ArrowRows):
            return self._rows[rows.start : rows.stop]
        names = [name for name in self._rows.columns if name not in self._large]
        columns = [self._rows.column(name, rows.start, rows.stop) for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def require(self, name: str, key: str) -> None:
        """Raise InputError for a non-empty file without the column `name`, which the config names under `key`."""
        if len(self) and name not in self.columns:
            raise InputError(
                f"{self.path}: no column {name!r}; it has {', '.join(sorted(self.columns)) or 'none'}; "
                f"add the column, or use another one in {key}"
            )


def columns_of(path: str, form: str = "auto") -> list[str]:
    """Columns of a data file, with those that its format adds, without reading the rows of a Parquet file."""
    if not os.path.isfile(path) or suffix_of(path) not in (*PARQUET_SUFFIXES, *JSON_SUFFIXES):
        return RowFile(path, form=form).columns
    if suffix_of(path) in JSON_SUFFIXES:
        names = list(dict.fromkeys(name for _, row in read_rows(path) for name in row))
    else:
        import pyarrow.parquet

        with readable_parquet(path):
            names = list(pyarrow.parquet.read_schema(path).names)
    name = recognised(path, names, form)
    return names if name == READY else list(dict.fromkeys([*names, *FORMATS[name].adds]))


def suffix_of(path: str) -> str:
    """The ending of a file's name that says how it is written, such as `.parquet` or `.jsonl.gz`."""
    name, suffix = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] + suffix if suffix == ".gz" else suffix


def unknown_suffix(path: str) -> InputError:
    known = ", ".join((*PARQUET_SUFFIXES, *JSON_SUFFIXES, *ARROW_SUFFIXES))
    return InputError(f"{path}: suffix {suffix_of(path) or '(none)'} is not supported; expected one of {known}")


class ArrowRows:
    """Rows of an Arrow table, which takes a tenth of the memory of Python objects.

    Args:
        nulls: `Nulls` of each column.
    """

    def __init__(self, table: Any, nulls: Mapping[str, Nulls], large: Mapping[str, RowGroups] | None = None) -> None:
        self.columns: list[str] = list(nulls)
        self._table, self._nulls, self._large = table, nulls, large or {}

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return without_nulls(self._table.slice(row, 1).to_pylist()[0], Nulls(False, self._nulls))

    def column(self, name: str, start: int, stop: int | None) -> list[Any]:
        """Same as RowFile.column."""
        stop = len(self) if stop is None else stop
        if name not in self.columns:
            return [None] * (stop - start)
        if name in self._large:
            values = self._large[name].values(start, stop)
        else:
            values = self._table.column(name).slice(start, stop - start).to_pylist()
        nulls = self._nulls[name]
        return [without_nulls(it, nulls) for it in values] if nulls.fields or nulls.inner else values


class ParquetRows(ArrowRows):
    """Rows of a Parquet file.

    Args:
        large: as in RowFile.
    """

    def __init__(self, path: str, large: Collection[str] = ()) -> None:
        import pyarrow.parquet

        with readable_parquet(path), pyarrow.parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            groups = {name: RowGroups(path, name) for name in columns if name in large}
            small = [name for name in columns if name not in large] if groups else None
            # `read_table` would import pyarrow.dataset, and `file.read` fails for nested columns of more than 2 GiB
            batches = list(file.iter_batches(ROWS_PER_CHUNK, columns=small))
            table = pyarrow.Table.from_batches(batches) if batches else file.read(columns=small)
            super().__init__(table, nulls_of(file.schema_arrow), groups)


def nulls_of(schema: Any) -> dict[str, Nulls]:
    """Those of each column of an Arrow schema."""
    return {name: Nulls.of(schema.field(name).type) for name in schema.names}


def is_saved_dataset(path: str) -> bool:
    """Whether `datasets` has saved it: a folder with the files of one split, or of several."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, SPLITS))


def read_arrow(path: str) -> tuple[Any, dict[str, Nulls]]:
    """The table of a file of Arrow's IPC formats, or of a folder that `datasets` has saved, and its nulls."""
    import pyarrow

    with readable(path, "Arrow file"):
        tables = [_mapped(file) for file in arrow_files(path)]
        table = pyarrow.concat_tables(tables)
    return table, nulls_of(table.schema)


def arrow_files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    if not os.path.isfile(os.path.join(path, STATE)):
        splits = sorted(name for name in os.listdir(path) if os.path.isfile(os.path.join(path, name, STATE)))
        raise InputError(
            f"{path}: a folder of the splits {', '.join(splits)}; expected one; name {os.path.join(path, splits[0])}"
            if splits
            else f"{path}: a folder of splits, none of which is there; save it again"
        )
    try:
        listed = [str(file["filename"]) for file in read_json(Path(path, STATE))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}/{STATE} cannot be read ({error}); save the dataset again") from None
    if not listed or any(os.path.basename(name) != name for name in listed):
        raise InputError(f"{path}/{STATE} names the files {listed[:3]}; expected files of this folder")
    return [os.path.join(path, name) for name in listed]


def _mapped(path: str) -> Any:
    """The table of one file, whose pages are read when they are needed."""
    import pyarrow

    source = pyarrow.memory_map(path)
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_file(source).read_all()


class RowGroups:
    """A column of a Parquet file with some of its row groups in memory, the last ones read."""

    def __init__(self, path: str, name: str) -> None:
        import pyarrow.parquet

        self._path, self._name = path, name
        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._groups: dict[int, Any] = {}  # oldest first
        self._is_reported = False

    def values(self, start: int, stop: int) -> list[Any]:
        """Values of rows [start, stop)."""
        values = list[Any]()
        while start < stop:
            group = bisect.bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[group + 1])
            values += self._read(group).slice(start - self._starts[group], end - start).to_pylist()
            start = end
        return values

    def _read(self, group: int) -> Any:
        import pyarrow.parquet

        column = self._groups.pop(group, None)
        if column is None:
            with readable_parquet(self._path), pyarrow.parquet.ParquetFile(self._path) as file:
                column = file.read_row_group(group, columns=[self._name]).column(self._name)
            num_bytes = column.nbytes
            while self._groups and num_bytes + sum(other.nbytes for other in self._groups.values()) > CACHE_BYTES:
                del self._groups[next(iter(self._groups))]
            if num_bytes > CACHE_BYTES and len(self._starts) > 2 and not self._is_reported:
                self._is_reported = True
                log.warning(
                    "%s: a row group has %d MiB in %r, and a row in another one reads all of it; write the file with "
                    "smaller row groups, of about 100 rows",
                    *(self._path, num_bytes >> 20, self._name),
                )
        self._groups[group] = column
        return column


@contextmanager
def readable(path: str, kind: str, hint: str = "write it again") -> Iterator[None]:
    """Raise InputError where reading the file raises."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable {kind} ({' '.join(str(error).split())[:160]}); {hint}") from None


def readable_parquet(path: str) -> AbstractContextManager[None]:
    return readable(
        path, "Parquet file", "expected Parquet; write it again, or rename it to .jsonl if it is JSON lines"
    )


def read_parquet(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 0, row) of each row, with one batch of rows in memory."""
    import pyarrow.parquet

    number = 0
    with readable_parquet(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_PER_BATCH):
            for row in batch.to_pylist():
                yield number, row
                number += 1


def read_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each line of a JSON-lines file, or of each item of a JSON array."""
    return read_jsonl(path) if suffix_of(path).startswith(JSONL_SUFFIXES) else read_array(path)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """The bytes of a file, those of a `.gz` file expanded."""
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a readable gzip file ({error}); compress it again") from None


def read_array(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each item of a file that is one JSON array."""
    with opened(path) as file:
        try:
            rows = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}: not JSON ({error}); expected one array of objects; name it .jsonl if it has one per line"
            ) from None
    if not isinstance(rows, list):
        raise InputError(f"{path}: found a JSON {type(rows).__name__}; expected an array of objects")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}: item {number} is a JSON {type(row).__name__}; expected an object")
        yield number, row


def read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line from 1, object) of each line of a JSON-lines file; blank lines are skipped."""
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: not JSON ({error}); expected one JSON object per line") from None
            if not isinstance(row, dict):
                raise InputError(
                    f"{path}:{number}: found a JSON {type(row).__name__}; expected one JSON object per line"
                )
            yield number, row


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: the file name, with as many parent folders as needed to distinguish equal file
    names.

    Repeated paths get `#2`, `#3`, ... from their second occurrence on.
    """
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    names: list[str] = []
    for path in parts:
        depth = 1
        others = [other for other in parts if other != path]
        while depth < len(path) and any(other[-depth:] == path[-depth:] for other in others):
            depth += 1
        names.append(writable("/".join(path[-depth:])))
    return [name if name not in names[:i] else f"{name}#{names[:i].count(name) + 1}" for i, name in enumerate(names)]
