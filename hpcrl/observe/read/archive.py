"""Reading of the rollout archive's HDF5 files, whose format is in `hpcrl.observe.record.archive`.

They may be from untrusted sources. HDF5 allows links into other files, data kept in other files, and filters and fill
values by which a small file unpacks to any size. The archive uses none of these.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.observe.record.archive import SCHEMA, ArchiveError
from hpcrl.sandbox.foreign_files import ForeignFileError, named

if TYPE_CHECKING:
    import h5py

_AT_ONCE = 2**28  # bytes of strings that are read together at most, if each were as long as the file
_FEWEST_AT_ONCE = 64

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # column -> (values (total,), offsets int64 (samples + 1,))


def read_samples(
    path: str | os.PathLike[str], names: Collection[str] | None = None, root: Path | None = None
) -> dict[str, np.ndarray]:
    """Return the sample columns only, those of `names` or all; otherwise as `read_step`."""
    return read_step(path, names=(), sample_names=names, root=root)[1]


@contextmanager
def open_archive(path: str | os.PathLike[str], root: Path | None = None) -> Iterator[h5py.File]:
    """Context with an archive inside `root`; None: its folder. Raises OSError."""
    import h5py

    with named(path, root) as name, h5py.File(name, "r") as file:
        yield file


@contextmanager
def whole_archive(path: str | os.PathLike[str], root: Path | None) -> Iterator[h5py.File]:
    """As `open_archive`; raises ArchiveError for a missing or damaged file."""
    try:
        with open_archive(path, root) as file:
            yield file
    except ArchiveError:
        raise
    except FileNotFoundError:
        raise ArchiveError(f"{path}: no such rollout file") from None
    except ForeignFileError as error:
        raise ArchiveError(str(error)) from None
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ArchiveError(f"{path}: not a whole rollout archive ({error})") from error


def read_step(
    path: str | os.PathLike[str],
    names: Collection[str] | None = None,
    sample_names: Collection[str] | None = None,
    root: Path | None = None,
) -> tuple[Columns, dict[str, np.ndarray], dict[str, int]]:
    """Return (token columns, sample columns, attributes); strings are object arrays of `str`.

    Raises ArchiveError for a missing or damaged file, or one of another format.

    Args:
        names: the token columns to read; a "?" at the end marks an optional one; None: all.
        sample_names: the sample columns; None: all.
        root: the folder that the file is inside; None: its own.
    """
    with whole_archive(path, root) as file:
        if file.attrs.get("schema") != SCHEMA:
            raise ArchiveError(
                f"{path}: schema {file.attrs.get('schema')} where {SCHEMA} is expected; not a rollout archive "
                "of this version"
            )
        attributes = {name: int(file.attrs[name]) for name in ("seed", "step", "weight_version", "schema")}
        recorded = member(file, "tokens")
        selected = recorded if names is None else names
        present = [name.removesuffix("?") for name in selected if not name.endswith("?") or name[:-1] in recorded]
        columns = {name: member(recorded, name) for name in present}
        tokens = {name: (column(group, "values"), column(group, "offsets")) for name, group in columns.items()}
        stored = member(file, "samples")
        samples = {name: column(stored, name) for name in (stored if sample_names is None else sample_names)}
    _check_lengths(path, tokens, samples)
    return tokens, samples, attributes


def _check_lengths(path: str | os.PathLike[str], tokens: Columns, samples: dict[str, np.ndarray]) -> None:
    counts = {len(offsets) - 1 for _, offsets in tokens.values()} | {len(values) for values in samples.values()}
    if len(counts) > 1:
        raise ArchiveError(f"{path}: columns have {sorted(counts)} samples; all must have the same number")
    for name, (values, offsets) in tokens.items():
        if offsets[0] != 0 or offsets[-1] != len(values) or np.any(np.diff(offsets) < 0):
            raise ArchiveError(f"{path}: offsets of tokens/{name} do not fit its {len(values)} values")


def member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """Return what the group itself holds under `name`. Raises KeyError if there is nothing, ValueError for a link."""
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        raise KeyError(f"no {name} in {group.name}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is a {type(link).__name__}; expected data of this file")
    return group[name]


def column(group: h5py.Group, name: str) -> np.ndarray:
    """Return the dataset under `name`, (n,): numbers, or strings as an object array of `str`. Raises ValueError for
    other formats."""
    import h5py

    dataset = member(group, name)
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{group.name}/{name} is a group; expected a dataset")
    _check_storage(dataset)
    if h5py.check_string_dtype(dataset.dtype):
        return _strings(dataset)
    if dataset.dtype.kind not in "biuf":
        raise ValueError(f"{dataset.name} holds {dataset.dtype}; expected numbers or strings")
    return np.asarray(dataset[:])


def _check_storage(dataset: h5py.Dataset) -> None:
    """Check that all values are in this file, uncompressed."""
    import h5py

    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{dataset.name} keeps its values in other files")
    if not filters <= {h5py.h5z.FILTER_FLETCHER32}:
        raise ValueError(f"{dataset.name} is compressed; archives of hpcrl are not")
    if dataset.ndim != 1:
        raise ValueError(f"{dataset.name} has shape {dataset.shape}; expected one dimension")
    if dataset.size * dataset.dtype.itemsize > dataset.id.get_storage_size():
        raise ValueError(f"{dataset.name} has {dataset.size} values, but the file holds fewer")


def _strings(dataset: h5py.Dataset) -> np.ndarray:
    """Read some strings at a time, because many entries may refer to the same long string."""
    size, left = dataset.size, dataset.file.id.get_filesize()
    at_once = max(_FEWEST_AT_ONCE, _AT_ONCE // max(left, 1))
    texts = np.empty(size, object)
    for start in range(0, size, at_once):
        strings = dataset.asstr()[start : start + at_once]
        left -= sum(map(len, strings))
        if left < 0:
            raise ValueError(f"{dataset.name} has longer strings than the file has bytes")
        texts[start : start + len(strings)] = strings
    return texts
