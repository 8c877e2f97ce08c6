"""Which replica writes what of a checkpoint, so that all write about as much and none gathers what others hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from hpcrl.batch.balance import balanced_assignment

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape)


def share_writing(weights: Mapping[str, ShardedTensor | ShardedTensorFactory], replica: int, num_replicas: int) -> None:
    """Makes one replica the writer of each weight, which all of them hold, in place; by size.

    The last number of a `replica_id` is the data-parallel one; what has only zeros is written.
    """
    sizes = np.array([entry.data.numel() for entry in weights.values()], np.int64)
    writers = balanced_assignment(sizes, num_replicas).tolist()
    for entry, writer in zip(weights.values(), writers, strict=True):
        entry.replica_id = (*entry.replica_id[:-1], (replica - writer) % num_replicas)


def own_parts(
    parameter: ShardedTensor | ShardedTensorFactory, key: str, flat: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """State of a range of a parameter, for writing under `key`: as boxes, which are all that a checkpoint knows.

    flat: (n,) state of the elements from `start` on of the parameter in row-major order, which no other replica has.
    parameter: the parameter's own entry; a factory lays it out in several parts (gate and up of SwiGLU).
    """
    entry = replace(parameter, key=key)
    laid_out = list(nested_values([entry.build()])) if isinstance(entry, ShardedTensorFactory) else [entry]
    for part in laid_out:
        assert part.data is not None and part.data.is_contiguous()
        # Where the part lies in the parameter, whose memory it shares.
        first = part.data.storage_offset() - parameter.data.storage_offset()
        low, high = max(first, start), min(first + part.data.numel(), start + flat.numel())
        prepended, offset = part.global_offset[: part.prepend_axis_num], part.global_offset[part.prepend_axis_num :]
        for corner, shape in boxes(part.local_shape, low - first, high - first):
            size = math.prod(shape)
            yield replace(
                part,
                data=flat[low - start :][:size].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_offset=(*prepended, *(a + b for a, b in zip(offset, corner, strict=True))),
                axis_fragmentations=None,  # boxes of several sizes are no regular grid
                replica_id=(*part.replica_id[:-1], 0),
            )
            low += size


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of an array in row-major order as boxes, whose elements follow one another.

    At most 2 len(shape) - 1 of them: whole rows in the middle, and what is left of the rows before and after.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner, row = shape[1:], math.prod(shape[1:])
    first_whole, after_whole = -(-start // row), stop // row
    if first_whole > after_whole:  # inside one row
        yield from _in_row(after_whole, boxes(inner, start - after_whole * row, stop - after_whole * row))
        return
    yield from _in_row(first_whole - 1, boxes(inner, start - (first_whole - 1) * row, row) if start % row else ())
    if first_whole < after_whole:
        yield (first_whole, *(0 for _ in inner)), (after_whole - first_whole, *inner)
    yield from _in_row(after_whole, boxes(inner, 0, stop - after_whole * row))


def _in_row(row: int, found: Iterator[Box] | tuple[()]) -> Iterator[Box]:
    for corner, size in found:
        yield (row, *corner), (1, *size)
