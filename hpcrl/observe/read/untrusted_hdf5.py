"""Safe reading of HDF5 files from untrusted sources.

The format allows links into other files, data kept in other files, and filters and fill values by which a small file
unpacks to any size. The archive uses none of these.
"""

from __future__ import annotations

import h5py
import numpy as np

_FLETCHER32 = {h5py.h5z.FILTER_FLETCHER32}
_AT_ONCE = 2**28  # bytes of strings that are read together at most, if each were as long as the file
_FEWEST_AT_ONCE = 64


def member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """Return what the group itself holds under `name`. Raises KeyError if there is nothing, ValueError for a link."""
    link = group.get(name, getlink=True)
    if link is None:
        raise KeyError(f"no {name} in {group.name}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is a {type(link).__name__}; expected data of this file")
    return group[name]


def column(group: h5py.Group, name: str) -> np.ndarray:
    """Return the dataset under `name`, (n,): numbers, or strings as an object array of `str`. Raises ValueError for
    other formats."""
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
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{dataset.name} keeps its values in other files")
    if not filters <= _FLETCHER32:
        raise ValueError(f"{dataset.name} is compressed; archives of hpcrl are not")
    if dataset.ndim != 1:
        raise ValueError(f"{dataset.name} has shape {dataset.shape}; expected one dimension")
    if dataset.size * dataset.dtype.itemsize > dataset.id.get_storage_size():
        raise ValueError(f"{dataset.name} has {dataset.size} values, but the file holds fewer")


def _strings(dataset: h5py.Dataset) -> np.ndarray:
    """Read some strings at a time, because many entries may refer to the same long string."""
    size, left = dataset.size, dataset.file.id.get_filesize()
    at_once = max(_FEWEST_AT_ONCE, _AT_ONCE // max(left, 1))
    found = np.empty(size, object)
    for start in range(0, size, at_once):
        strings = dataset.asstr()[start : start + at_once]
        left -= sum(map(len, strings))
        if left < 0:
            raise ValueError(f"{dataset.name} has longer strings than the file has bytes")
        found[start : start + len(strings)] = strings
    return found
