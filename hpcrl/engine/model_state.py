"""A model's part of a checkpoint: sharded tensors under global names, each written by one replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from hpcrl.batch.packing import balanced_assignment
from hpcrl.model.build import named_parameters
from hpcrl.model.params import OUTPUT_LAYER, SCALAR_HEADS, Head

if TYPE_CHECKING:
    from hpcrl.model.gpt import PackedGPT
    from hpcrl.runtime.groups import RoleGroups


Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape)


def assign_writers(
    weights: Mapping[str, ShardedTensor | ShardedTensorFactory], replica: int, num_replicas: int
) -> None:
    """Choose the replica that writes each weight, balanced by size, in place; all replicas hold all weights.

    The last number of a `replica_id` is the data-parallel one; an entry with only zeros is written.
    """
    sizes = np.array([entry.data.numel() for entry in weights.values()], np.int64)
    writers = balanced_assignment(sizes, num_replicas).tolist()
    for entry, writer in zip(weights.values(), writers, strict=True):
        entry.replica_id = (*entry.replica_id[:-1], (replica - writer) % num_replicas)


def sharded_parts(
    parameter: ShardedTensor | ShardedTensorFactory, key: str, flat: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """Yield the state of a range of a parameter as boxes, for writing under `key`.

    Args:
        parameter: the parameter's own entry; a factory lays it out in several parts (gate and up of SwiGLU).
        flat: (n,) state of the elements from `start` on of the parameter in row-major order, which no other replica
            has.
    """
    entry = replace(parameter, key=key)
    laid_out = list(nested_values([entry.build()])) if isinstance(entry, ShardedTensorFactory) else [entry]
    for part in laid_out:
        assert part.data is not None and part.data.is_contiguous()
        # Offset of the part in the parameter, whose memory it shares.
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
                axis_fragmentations=None,  # boxes of several sizes do not form a regular grid
                replica_id=(*part.replica_id[:-1], 0),
            )
            low += size


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements [start, stop) of an array in row-major order as boxes of contiguous elements.

    At most 2 len(shape) - 1 boxes: whole rows in the middle, and the remaining parts of the rows before and after.
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


def state_metadata(groups: RoleGroups, *, has_experts: bool) -> dict[str, Any]:
    """Return megatron's metadata of the format of modules' and optimizers' state."""
    return {
        "dp_cp_group": groups.pgc.dp_cp,
        "non_homogeneous_layers": True,  # one key per layer instead of one stack of all layers
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": has_experts,  # one key per expert
    }


def model_state(
    chunks: Sequence[PackedGPT], groups: RoleGroups, head: Head, metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """Return megatron's ShardedTensors, which alias the parameters, by `_state_name`. For saving, weights that several
    ranks hold are divided among them."""
    model = {
        _state_name(number, name): entry
        for number, chunk in enumerate(chunks)
        for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
        # Megatron's modules keep empty extra states, which would be written as pickles.
        if not isinstance(entry, ShardedObject)
    }
    for entry in model.values():
        # Megatron allows different vocabulary sizes because its padding depends on the layout; ours does not.
        entry.allow_shape_mismatch = False
    output_layer = model.get(_state_name(len(chunks) - 1, OUTPUT_LAYER))
    if output_layer is not None and head in SCALAR_HEADS:
        output_layer.key = SCALAR_HEADS[head]
    if not is_loading:
        experts = {name: entry for name, entry in model.items() if ".experts." in name}
        dense = {name: entry for name, entry in model.items() if name not in experts}
        for entries, group in ((dense, groups.pgc.dp_cp), (experts, groups.pgc.expt_dp)):
            assign_writers(entries, group.rank(), group.size())
    return model


def load_model_state(chunks: Sequence[PackedGPT], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors loaded for `model_state` into the parameters; those without an entry keep their values."""
    parameters = {_state_name(*place): parameter for place, parameter in named_parameters(chunks).items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _state_name(chunk: int, name: str) -> str:
    """Name of a chunk's parameter in a state; chunks count their layers from 0."""
    return f"chunk{chunk}.{name}" if chunk else name
