"""Rows of Parquet and JSONL files, and distribution of work over ranks."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_text import writable

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
    found: list[Result] = []
    for start in range(world.rank, world.rank + len(pieces), world.size):
        own_piece = pieces[start : start + 1]  # empty if the last round has no piece for this rank
        results = world.run_collectively(partial(_each, work, own_piece))
        found += [result for done in world.all_gather_object(results) for result in done]
    return found


def _each(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    return [work(piece) for piece in pieces]


PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
ROWS_PER_BATCH = 4096
ROWS_PER_CHUNK = 2**17  # of a table in memory
CACHE_BYTES = 2**28  # of row groups of a large column, per rank

log = logging.getLogger(__name__)


class RowFile:
    """One data file: `len(file)` rows, `file[i]` a dict, `file.column(name)` a list, `file.columns` the names.

    large: columns that stay in a Parquet file until rows are asked for, because every rank would hold them; `file[i]`
    is without them.
    """

    def __init__(self, path: str, large: Collection[str] = ()) -> None:
        if not os.path.isfile(path):
            found = "a directory" if os.path.isdir(path) else "no such file"
            raise InputError(f"{path}: {found}; expected a Parquet or JSONL file (data.train_files, data.val_files)")
        suffix = os.path.splitext(path)[1].lower()
        self.path = path
        self._rows: ParquetRows | list[dict[str, Any]]
        if suffix in PARQUET_SUFFIXES:
            self._rows = ParquetRows(path, large)
            self.columns = self._rows.columns
        elif suffix in JSONL_SUFFIXES:
            self._rows = [row for _, row in read_jsonl(path)]
            self.columns = sorted({name for row in self._rows for name in row})
        else:
            known = ", ".join(PARQUET_SUFFIXES + JSONL_SUFFIXES)
            raise InputError(f"{path}: suffix {suffix or '(none)'} is not supported; expected one of {known}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]

    def column(self, name: str, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return values of a column in rows [start, stop); None where a row lacks it."""
        if isinstance(self._rows, ParquetRows):
            return self._rows.column(name, start, stop)
        return [row.get(name) for row in self._rows[start:stop]]

    def require(self, name: str, key: str) -> None:
        """Raise InputError for a non-empty file without the column `name`, which the config names under `key`."""
        if len(self) and name not in self.columns:
            raise InputError(
                f"{self.path}: no column {name!r}; it has {', '.join(self.columns) or 'none'}; "
                f"add the column, or use another one in {key}"
            )


def columns_of(path: str) -> list[str]:
    """Columns of a data file, without reading all of it; of JSON lines, those of the first row."""
    suffix = os.path.splitext(path)[1].lower()
    if not os.path.isfile(path) or suffix not in PARQUET_SUFFIXES + JSONL_SUFFIXES:
        return RowFile(path).columns  # raises
    if suffix in JSONL_SUFFIXES:
        return list(next(read_jsonl(path), (0, {}))[1])
    import pyarrow.parquet

    with readable_parquet(path):
        return list(pyarrow.parquet.read_schema(path).names)


class ParquetRows:
    """A Parquet file as an Arrow table, which takes a tenth of the memory of Python objects. large: as of RowFile."""

    def __init__(self, path: str, large: Collection[str] = ()) -> None:
        import pyarrow.parquet

        with readable_parquet(path), pyarrow.parquet.ParquetFile(path) as file:
            self.columns: list[str] = list(file.schema_arrow.names)
            self._large = {name: RowGroups(path, name) for name in self.columns if name in large}
            small = [name for name in self.columns if name not in large] if self._large else None
            # `read_table` would import pyarrow.dataset, and `file.read` fails for nested columns of more than 2 GiB
            batches = list(file.iter_batches(ROWS_PER_CHUNK, columns=small))
            self._table = pyarrow.Table.from_batches(batches) if batches else file.read(columns=small)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._table.slice(row, 1).to_pylist()[0]

    def column(self, name: str, start: int, stop: int | None) -> list[Any]:
        """Same as RowFile.column."""
        stop = len(self) if stop is None else stop
        if name in self._large:
            return self._large[name].values(start, stop)
        if name not in self.columns:
            return [None] * (stop - start)
        return self._table.column(name).slice(start, stop - start).to_pylist()


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
        found = list[Any]()
        while start < stop:
            group = bisect.bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[group + 1])
            found += self._read(group).slice(start - self._starts[group], end - start).to_pylist()
            start = end
        return found

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
def readable_parquet(path: str) -> Iterator[None]:
    """Raise InputError where reading the file raises."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:160]}); "
            "expected Parquet; write it again, or rename it to .jsonl if it is JSON lines"
        ) from None


def read_parquet(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 0, row) of each row, with one batch of rows in memory."""
    import pyarrow.parquet

    number = 0
    with readable_parquet(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_PER_BATCH):
            for row in batch.to_pylist():
                yield number, row
                number += 1


def read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line from 1, object) of each line of a JSON-lines file; blank lines are skipped."""
    with open(path, "rb") as lines:
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
