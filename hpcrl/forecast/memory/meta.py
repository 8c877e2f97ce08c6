"""A job's models on torch's meta device, rank by rank, in one process: no GPU, no MPI, no memory.

Process groups are of torch's "fake" backend: they have a size and a rank, and their collectives do nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrl.forecast.memory.state import RoleModel
from hpcrl.model.build import build_model
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import GroupCache, RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.platform import make_gather_buffer

DTYPES = {4: torch.float32, 2: torch.bfloat16}


class OwnGroups(GroupCache):
    """The groups of one rank, made without the other ranks."""

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if self._rank not in ranks:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[RoleGroups]:
    """Context in which this process is a rank of a layout, in a world that ends with the layout's last rank. It has
    nothing of a rank that the process was before."""
    make_gather_buffer()
    hook = sys.excepthook  # torch puts its own around it each time
    dist.init_process_group("fake", rank=rank, world_size=max(layout.ranks) + 1, store=FakeStore())
    try:
        yield make_groups({"role": layout}, rank, OwnGroups(rank))["role"]
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def parameter_bytes(model: RoleModel, stage: int) -> int:
    """Bytes of the parameters that megatron builds for a pipeline stage. Raises InputError if megatron rejects the
    model or the layout."""
    with fake_rank(model.layout, model.layout.rank_of(pp=stage)) as groups, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chunks = build_model(
                model.shape,
                groups,
                head=model.head,
                dtype=DTYPES[model.itemsize],
                sequence_parallel=model.sequence_parallel,
                lora=model.lora,
                device=torch.device("meta"),
            )
        except (ValueError, AssertionError) as error:
            raise InputError(f"megatron-core does not build this model: {error}") from error
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
