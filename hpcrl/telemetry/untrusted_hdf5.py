"""Reading HDF5 files that may be a stranger's. The format has links into other files, data kept in other files, and
filters and fill values by which a small file unpacks to any size: none of them is used by a file of ours."""

from __future__ import annotations

import h5py
import numpy as np

_FLETCHER32 = {h5py.h5z.FILTER_FLETCHER32}
_STRINGS_AT_ONCE = 64


def member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """What the group itself holds under `name`. KeyError where there is nothing, ValueError for a link elsewhere."""
    link = group.get(name, getlink=True)
    if link is None:
        raise KeyError(f"no {name} in {group.name}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is a {type(link).__name__}; expected data of this file")
    return group[name]


def column(group: h5py.Group, name: str) -> np.ndarray:
    """The dataset under `name`, (n,): numbers, or strings as an object array of `str`. ValueError where it is none of
    ours."""
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
    """All of its values are in this file, as they are."""
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{dataset.name} keeps its values in other files")
    if not filters <= _FLETCHER32:
        raise ValueError(f"{dataset.name} is compressed, which no archive of hpcrl is")
    if dataset.ndim != 1:
        raise ValueError(f"{dataset.name} has shape {dataset.shape}; expected one dimension")
    if dataset.size * dataset.dtype.itemsize > dataset.id.get_storage_size():
        raise ValueError(f"{dataset.name} has {dataset.size} values, and the file holds fewer")


def _strings(dataset: h5py.Dataset) -> np.ndarray:
    """A few at a time: many entries may name the same long string."""
    size, left = dataset.size, dataset.file.id.get_filesize()
    found = np.empty(size, object)
    for start in range(0, size, _STRINGS_AT_ONCE):
        some = dataset.asstr()[start : start + _STRINGS_AT_ONCE]
        left -= sum(map(len, some))
        if left < 0:
            raise ValueError(f"{dataset.name} has longer strings than the file has bytes")
        found[start : start + len(some)] = some
    return found
