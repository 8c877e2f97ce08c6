"""The column routed_experts: which experts each token went to, or is to go to.

int16, in sequence space, for each token layers x topk numbers end to end: of each layer with experts, in order, the
experts in any order; `OWN` where nothing was recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from hpcrl.batch.ragged import Ragged
from hpcrl.model.context_parallel import places
from hpcrl.model.router import Routing
from hpcrl.model.routing import OWN
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.engine.microbatch import MicroBatch
    from hpcrl.grid.groups import RoleGroups
    from hpcrl.model.shape import ModelShape


def make_routing(
    lengths: Tensor, size: int, mine: Tensor | slice, shape: ModelShape, experts: Ragged | None
) -> Routing:
    """Of packed sequences, padded to `size` tokens, of which this rank has `mine`. lengths: int64 (N,), N = 0 for a
    dummy; experts: rows of routed_experts, None: routers choose."""
    total, replayed = int(lengths.sum()), None
    sequences = torch.full((size,), len(lengths))
    sequences[:total] = torch.repeat_interleave(lengths)
    if experts is not None:
        width = len(shape.moe_layers) * shape.moe_topk
        _check(experts, lengths * width, shape.num_experts)
        replayed = torch.full((size, width), OWN, dtype=torch.int16)
        replayed[:total] = torch.from_numpy(experts.values).view(total, width)
        replayed = replayed[mine].unflatten(1, (-1, shape.moe_topk))
    return Routing(sequences[mine], lengths, shape.moe_layers, replayed)


def _check(experts: Ragged, lengths: Tensor, num_experts: int) -> None:
    """A recording may come from a file."""
    if not np.array_equal(experts.lengths, lengths.numpy()):
        raise InputError(
            f"routed_experts has {experts.lengths.tolist()} numbers for samples that need {lengths.tolist()}; "
            "replay recordings of this model"
        )
    low, high = int(experts.values.min()), int(experts.values.max())
    if low < OWN or high >= num_experts:
        raise InputError(
            f"routed_experts has experts {low} to {high}, and the model 0 to {num_experts - 1}; "
            "replay recordings of this model"
        )


def recorded_experts(micro: MicroBatch, shape: ModelShape, groups: RoleGroups) -> Ragged:
    """What the routers of a micro-batch have recorded, as a column of its samples. Collective over the replica."""
    routing = micro.packed.routing
    assert routing is not None and routing.recorded
    layout, some = groups.layout, next(iter(routing.recorded.values()))
    # int32, as NCCL knows no int16
    found = torch.full((len(some), len(routing.layers), shape.moe_topk), OWN, dtype=torch.int32, device=some.device)
    for layer, ids in routing.recorded.items():
        found[:, layer] = ids
    if layout.pp > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.pp)
    found = gather_from_sequence_parallel_region(found, group=groups.tp)
    if layout.cp > 1:
        found = gather_from_sequence_parallel_region(found, group=groups.pgc.cp)
        found = found[places(len(found), layout.cp).to(found.device)]
    tokens = found[: int(routing.lengths.sum())].flatten().to("cpu", torch.int16)
    return Ragged.from_lengths(tokens.numpy(), routing.lengths.cpu().numpy() * found[0].numel())
