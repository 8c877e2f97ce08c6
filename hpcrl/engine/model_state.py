"""A model's part of a checkpoint: megatron's sharded tensors under global names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from hpcrl.engine.saved_parts import share_writing
from hpcrl.model.build import named_parameters
from hpcrl.model.params import OUTPUT_LAYER, SCALAR_HEADS, Head

if TYPE_CHECKING:
    from hpcrl.grid.groups import RoleGroups
    from hpcrl.model.gpt import PackedGPT


def state_metadata(groups: RoleGroups, *, has_experts: bool) -> dict[str, Any]:
    """What megatron's modules and optimizers are told of the form of their state."""
    return {
        "dp_cp_group": groups.pgc.dp_cp,
        "non_homogeneous_layers": True,  # one key per layer instead of one stack of all layers
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": has_experts,  # one key per expert
    }


def model_state(
    chunks: Sequence[PackedGPT], groups: RoleGroups, head: Head, metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """By `_state_name`, megatron's ShardedTensors, which alias the parameters; for saving, those with the same data on
    several ranks share out who writes which part."""
    model = {
        _state_name(number, name): entry
        for number, chunk in enumerate(chunks)
        for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
        # Megatron's modules keep empty extra states, which would be written as pickles.
        if not isinstance(entry, ShardedObject)
    }
    for entry in model.values():
        # Megatron pads the vocabulary by layout and so lets its size differ; ours does not depend on it.
        entry.allow_shape_mismatch = False
    output_layer = model.get(_state_name(len(chunks) - 1, OUTPUT_LAYER))
    if output_layer is not None and head in SCALAR_HEADS:
        output_layer.key = SCALAR_HEADS[head]
    if not is_loading:
        experts = {name: entry for name, entry in model.items() if ".experts." in name}
        dense = {name: entry for name, entry in model.items() if name not in experts}
        for entries, group in ((dense, groups.pgc.dp_cp), (experts, groups.pgc.expt_dp)):
            share_writing(entries, group.rank(), group.size())
    return model


def take_model_state(chunks: Sequence[PackedGPT], tensors: Mapping[str, Tensor]) -> None:
    """Copy what was loaded for `model_state` into the parameters; those without an entry keep their values."""
    parameters = {_state_name(*place): parameter for place, parameter in named_parameters(chunks).items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _state_name(chunk: int, name: str) -> str:
    """Of a chunk's parameter in a state; chunks count their layers from 0."""
    return f"chunk{chunk}.{name}" if chunk else name
