"""Optimizers over one role's groups, gradient norm and clipping, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hpcrl.algorithms.optimizers.optimizer import Optimizer
from hpcrl.engine.matrix_updates import MatrixUpdates
from hpcrl.engine.sharded_optimizer import ShardedOptimizer, dtypes_of, init_state
from hpcrl.model.shape import is_adapter
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.megatron_versions import grads_for_norm

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from hpcrl.config.schema import OptimConfig
    from hpcrl.model.params import Shard
    from hpcrl.model.shape import ModelShape
    from hpcrl.runtime.groups import RoleGroups


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of `total_steps`; megatron's `OptimizerParamScheduler`.

    Linear from lr_warmup_init to lr over the warm-up, then the decay from lr to min_lr until `lr_decay_steps` (counted
    from step 0), then min_lr. "constant" stays at lr.
    """
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * step / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    decay_end = optim.lr_decay_steps or total_steps
    if step > decay_end:
        return optim.min_lr
    if optim.lr_decay_style == "inverse-square-root":
        return max(optim.min_lr, optim.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
    progress = (step - warmup) / max(decay_end - warmup, 1)
    share = 1.0 - progress if optim.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
    return optim.min_lr + share * (optim.lr - optim.min_lr)


def build_optimizer(
    models: Sequence[DistributedDataParallel],
    optim: OptimConfig,
    groups: RoleGroups,
    dtype: torch.dtype,
    shape: ModelShape,
    shards: Mapping[Tensor, Shard],
    tower_lr: float | None = None,
) -> MegatronOptimizer:
    """Build the optimizer that `optim` names: under megatron's distributed optimizer if it is sharded, else with whole
    state on every replica.

    Megatron's own factory gathers the parameter groups over the whole world, including ranks outside this role; here
    every stage has the same groups by construction. Raises InputError for adapters that the optimizer cannot train.

    Args:
        shards: this rank's part of each parameter.
        tower_lr: peak learning rate of the vision tower, if it differs.
    """
    chosen = optim.chosen()
    if chosen.without_adapters and any(is_adapter(shard.name) for shard in shards.values()):
        raise InputError(f"optimizer={optim.optimizer} with adapters (model.lora_rank): {chosen.without_adapters}")
    config = OptimizerConfig(
        optimizer="adam" if chosen.is_sharded else "sgd",  # names of megatron
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        clip_grad=0.0,  # the engine computes the norm and clips
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=chosen.is_sharded,
    )
    trained = [_is_expert(each) for model in models for each in model.parameters() if each.requires_grad]
    scale = None if tower_lr is None else tower_lr / optim.lr
    builder, parts = _Builder(models, chosen, groups, config, shape, shards), []
    build = builder.sharded if chosen.is_sharded else builder.whole
    for is_expert in sorted(set(trained)):
        param_groups = _param_groups(models, optim, is_expert, scale)
        part = build(param_groups, is_expert=is_expert)
        part.tp_group = groups.pgc.expt_tp if is_expert else groups.tp
        parts.append(part)
    return parts[0] if len(parts) == 1 else ChainedOptimizer(parts)


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of the experts and of all other parameters if a model has both, else the only one."""
    parts: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield main weights, moments and step counters."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class _Builder:
    """What the optimizer of the experts and that of all other parameters have in common."""

    models: Sequence[DistributedDataParallel]
    chosen: Optimizer
    groups: RoleGroups
    config: OptimizerConfig
    shape: ModelShape
    shards: Mapping[Tensor, Shard]

    def sharded(self, param_groups: list[dict[str, Any]], *, is_expert: bool) -> MegatronOptimizer:
        """Build a sharded optimizer: those of the experts and of all other parameters are sharded over different
        ranks."""
        pgc = self.groups.pgc
        optimizer = ShardedOptimizer(
            param_groups,
            self.config,
            None,
            None,
            model_chunks=list(self.models),
            per_model_buffers={
                number: model.expert_parallel_buffers if is_expert else model.buffers
                for number, model in enumerate(self.models)
            },
            data_parallel_group=pgc.intra_expt_dp if is_expert else pgc.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=(pgc.tp_ep_pp if is_expert else pgc.mp).rank(),
            distributed_optimizer_instance_id=0,
        )
        trained = {each: self.shards[each] for group in param_groups for each in group["params"]}
        mains = {shard.name: optimizer.main_of(each) for each, shard in trained.items() if shard.is_matrix}
        places = {(trained[each].chunk, trained[each].local_name): place for each, place in optimizer.places()}
        weights = {name: main for name, main in mains.items() if main is not None}
        matrices = MatrixUpdates(self.chosen, self.shape, self.groups, places, weights, is_expert=is_expert)
        optimizer.use(self.chosen, matrices, {each: shard.is_matrix for each, shard in trained.items()})
        optimizer.grad_stats_parallel_group = pgc.intra_dist_opt
        return optimizer

    def whole(self, param_groups: list[dict[str, Any]], *, is_expert: bool) -> MegatronOptimizer:
        """Build an optimizer of which each replica has the whole state."""
        chosen, config, pgc = self.chosen, self.config, self.groups.pgc

        def init(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
            dtypes = dtypes_of(chosen, is_matrix=False)
            states = {each: dtypes for group in optimizer.param_groups for each in group["params"]}
            init_state(optimizer, states, counts=False)

        inner, has_own_state = chosen.make(param_groups, _NoMatrices()), type(chosen).make is not Optimizer.make
        optimizer = (
            Float16OptimizerWithFloat16Params(inner, config, None, init)
            if config.bf16
            else FP32Optimizer(inner, config, init)
        )
        optimizer.grad_stats_parallel_group = pgc.tp_ep_pp if is_expert else pgc.mp
        if not has_own_state:  # torch's optimizers make theirs at the first step
            init(optimizer.optimizer)
        return optimizer


class _NoMatrices:
    """The matrices of an optimizer that is not sharded: all weights count as others."""

    def __contains__(self, weight: object) -> bool:
        return False

    def apply(
        self, function: Callable[[Tensor], Tensor], ranges: MutableMapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        return {}


def _is_expert(parameter: torch.Tensor) -> bool:
    """Whether megatron marks the parameter as divided by expert parallelism."""
    return not getattr(parameter, "allreduce", True)


def _param_groups(
    models: Sequence[DistributedDataParallel], optim: OptimConfig, is_expert: bool, tower_scale: float | None
) -> list[dict[str, Any]]:
    """Return two groups, matrices and vectors (norms, biases); vectors have no weight decay. With `tower_scale`, the
    factor of its learning rate, the vision tower has two of its own, which are empty on stages without it.

    The groups have the marks that megatron matches when it loads a checkpoint.
    """

    def is_own(parameter: torch.Tensor) -> bool:
        return tower_scale is not None and getattr(parameter, "tower", False)

    all_parameters = [parameter for model in models for parameter in model.parameters()]
    parameters = [each for each in all_parameters if each.requires_grad and _is_expert(each) == is_expert]
    return [
        {
            "params": [each for each in parameters if (each.dim() > 1) == decayed and is_own(each) == of_tower],
            "lr": optim.lr,
            "weight_decay": optim.weight_decay if decayed else 0.0,
            "wd_mult": 1.0 if decayed else 0.0,
            "lr_mult": (tower_scale or 1.0) if of_tower else 1.0,
            "is_expert_parallel": is_expert,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": optim.lr,
            "min_lr": optim.min_lr,
        }
        for of_tower in ((False,) if tower_scale is None or is_expert else (False, True))
        for decayed in (True, False)
    ]


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over replicas and tied embeddings, without its division by the token count."""
    finalize_model_grads(model, None, **kwargs)
    # Parameters that all tensor-parallel ranks hold, of which each has a part of the gradient: that of an expert's
    # columns, or of its own pictures. Megatron has no such parameters.
    _sum_of("expert_tensor_parallel", model, kwargs["pg_collection"].expt_tp)
    _sum_of("tower", model, kwargs["pg_collection"].tp)


def _sum_of(mark: str, models: list[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters with the attribute `mark` over the group."""
    if group.size() == 1:
        return
    parameters: Iterator[Any] = (parameter for model in models for parameter in model.parameters())
    grads = [each.main_grad for each in parameters if getattr(each, mark, False) and each.requires_grad]
    if grads:
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(summed)


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the L2 norm over all ranks, computed in fp32. Collective, after the optimizer's `prepare_grads`.

    Equals megatron's `get_grad_norm`, which without Transformer Engine and Apex synchronises once per tensor; this
    function synchronises once.
    """
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for part in optimizer_parts(optimizer):
        by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(grads_for_norm(part))
    squares = torch.stack([_norm(grads).square() for grads in by_group.values()])
    for square, group in zip(squares, by_group, strict=True):
        dist.all_reduce(square, group=group)
    return math.sqrt(sum(squares.tolist()))


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of all elements, () fp32."""
    if not tensors:
        return torch.zeros((), device=platform.device())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, max_norm: float, norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm` if it is larger."""
    factor = max_norm / (norm + 1e-6)  # as in `torch.nn.utils.clip_grad_norm_`
    parameters = [parameter for part in optimizer_parts(optimizer) for parameter in part.get_parameters()]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor < 1.0 and grads:
        torch._foreach_mul_(grads, factor)
