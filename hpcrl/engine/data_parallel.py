"""Megatron's wrapper of a model's chunks. Gradients are fp32; communication between replicas overlaps with computation.

The gradients of a bucket are reduced while the last micro-batch's backward pass computes those of the next bucket. The
distributed optimizer's weights of a bucket are gathered while the next forward pass computes the layers before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcrl.runtime import platform
from hpcrl.runtime.accelerator import has_nccl
from hpcrl.runtime.exits import InputError

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.config.schema import DdpConfig, OptimConfig
    from hpcrl.model.gpt import PackedGPT
    from hpcrl.model.shape import ModelShape
    from hpcrl.runtime.groups import RoleGroups


class Overlap(NamedTuple):
    """Megatron's options of the same names, and the parameters of a bucket at most; None: megatron's choice."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None

    @classmethod
    def of(
        cls, cfg: DdpConfig | None, shape: ModelShape, groups: RoleGroups, *, sharded: bool, has_adapters: bool
    ) -> Overlap:
        """Return what overlaps. By default all that is possible, over NCCL: a backend on the host blocks. Raises
        InputError for options that are not possible.

        Args:
            sharded: whether megatron's distributed optimizer is used.
        """
        asked = (None, None) if cfg is None else (cfg.overlap_grad_reduce, cfg.overlap_param_gather)
        has_tower = shape.vision is not None and shape.vision.train != "none"
        shares_gpu = platform.device().type == "cuda" and not has_nccl()
        reduce_problems = {
            "ranks that share a GPU block in each transfer": shares_gpu,
            "the vision tower has no gradient in a micro-batch without pictures": has_tower,
        }
        gather_problems = {
            **reduce_problems,
            "this optimizer's state is not sharded over replicas": not sharded,
            "adapters are too small to gain from it": has_adapters,
        }
        by_default = has_nccl() and groups.pgc.dp_cp.size() > 1
        enabled = []
        for key, value, problems in zip(cls._fields[:2], asked, (reduce_problems, gather_problems), strict=True):
            problem = next((problem for problem, applies in problems.items() if applies), None)
            if value and problem:
                raise InputError(f"model.ddp.{key}=true, but {problem}; set it to null")
            enabled.append(value if value is not None else by_default and problem is None)
        return cls(enabled[0], enabled[1], None if cfg is None else cfg.bucket_size)


def sums_weight_gradients(asked: bool | None, optim: OptimConfig | None, dtype: torch.dtype) -> bool:
    """Whether the gradients of bf16 weights are added to the fp32 sum over micro-batches without being rounded to bf16
    first. By default on GPUs: a CPU would compute these products in fp32."""
    if optim is None or dtype is torch.float32:
        return False
    return platform.device().type == "cuda" if asked is None else asked


class DataParallelChunks:
    """A model's chunks in megatron's wrappers."""

    def __init__(
        self, chunks: Sequence[PackedGPT], config: Any, groups: RoleGroups, overlap: Overlap, *, sharded: bool
    ) -> None:
        self._gathers_late = overlap.overlap_param_gather
        self.models = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, **overlap._asdict()
                ),
                chunk,
                pg_collection=groups.pgc,
            )
            for chunk in chunks
        ]
        if overlap.overlap_grad_reduce:
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                # Megatron's hook also requires a gradient of parameters whose gradient is in `main_grad` already.
                parameter.requires_some_grad = True
            config.no_sync_func = [model.no_sync for model in self.models]
            if len(chunks) == 1:
                (config.no_sync_func,) = config.no_sync_func
        if self._gathers_late:
            for bucket_group in self._bucket_groups():
                bucket_group.param_gather_dispatched = True  # replicas begin with the same weights

    def _bucket_groups(self) -> Iterator[Any]:
        for model in self.models:
            yield from (*model.bucket_groups, *model.expert_parallel_bucket_groups)

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()

    def gather_weights(self) -> None:
        """Complete the weights after an optimizer step, if the next forward pass would do it otherwise. Collective."""
        if self._gathers_late:
            for bucket_group in self._bucket_groups():
                if not bucket_group.param_gather_dispatched:
                    bucket_group.start_param_sync(force_sync=True)

    def wait_for(self, weight: Tensor) -> None:
        """Wait until a weight is complete that is used outside of its module, where megatron would wait for it."""
        bucket_group = self.models[-1].param_to_bucket_group.get(weight)
        if self._gathers_late and bucket_group is not None:
            bucket_group.finish_param_sync()
