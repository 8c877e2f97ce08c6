"""Optimizers over one role's groups, low-precision Adam moments, gradient norm and clipping, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import Adam, OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.adamw import adamw

from hpcrl.engine.model_state import sharded_parts
from hpcrl.runtime import platform
from hpcrl.runtime.megatron_versions import grads_for_norm

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from hpcrl.config.schema import OptimConfig
    from hpcrl.runtime.groups import RoleGroups


MOMENTS = ("exp_avg", "exp_avg_sq")
ELEMENTS_AT_ONCE = 2**24  # of parameters on a GPU: their two moments in fp32 take 128 MiB
ELEMENTS_IN_CACHE = 2**18  # of parameters on a CPU, which is slower outside its cache


class CompactAdam(torch.optim.AdamW):
    """Torch's AdamW, computed in fp32, with moments stored in other dtypes, rounded to nearest after each step.
    Gradients and weights are fp32.

    Transformer Engine's FusedAdam can do the same, but on CUDA only; here every device computes the same numbers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameters in batches([each for each in group["params"] if each.grad is not None]):
                states = [self.state[parameter] for parameter in parameters]
                moments = {name: [state[name] for state in states] for name in MOMENTS}
                in_fp32 = {name: as_fp32(tensors) for name, tensors in moments.items()}
                adamw(
                    parameters,
                    [parameter.grad for parameter in parameters if parameter.grad is not None],
                    in_fp32["exp_avg"],
                    in_fp32["exp_avg_sq"],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for name, tensors in moments.items():
                    if in_fp32[name] is not tensors:
                        torch._foreach_copy_(tensors, in_fp32[name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the moments' dtypes; torch converts all state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in self.dtypes.items():
                state[name] = state[name].to(dtype)


def batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield successive tensors of ELEMENTS_AT_ONCE or ELEMENTS_IN_CACHE elements in all, or one larger tensor."""
    batch: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        most = ELEMENTS_IN_CACHE if tensor.device.type == "cpu" else ELEMENTS_AT_ONCE
        if batch and elements + tensor.numel() > most:
            yield batch
            batch, elements = [], 0
        batch.append(tensor)
        elements += tensor.numel()
    if batch:
        yield batch


def as_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies in fp32, or the tensors themselves if they are fp32."""
    if all(tensor.dtype is torch.float32 for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


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
    done = (step - warmup) / max(decay_end - warmup, 1)
    left = 1.0 - done if optim.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return optim.min_lr + left * (optim.lr - optim.min_lr)


def uses_distributed_optimizer(optim: OptimConfig) -> bool:
    """Whether state is sharded over data-parallel ranks: Adam's only, as in megatron."""
    return optim.optimizer == "adam"


def build_optimizer(
    models: Sequence[DistributedDataParallel],
    optim: OptimConfig,
    groups: RoleGroups,
    dtype: torch.dtype,
    tower_lr: float | None = None,
) -> MegatronOptimizer:
    """Build AdamW under megatron's distributed optimizer, or SGD with whole state on every replica.

    Megatron's own factory gathers the parameter groups over the whole world, including ranks outside this role; here
    every stage has the same groups by construction. tower_lr: peak learning rate of the vision tower, if it is another.
    """
    config = OptimizerConfig(
        optimizer=optim.optimizer,
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        sgd_momentum=optim.momentum,
        clip_grad=0.0,  # the engine computes the norm and clips
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=uses_distributed_optimizer(optim),
    )
    trained = [_is_expert(each) for model in models for each in model.parameters() if each.requires_grad]
    scale = None if tower_lr is None else tower_lr / optim.lr
    parts = [_build_part(models, optim, groups, config, scale, is_expert=each) for each in sorted(set(trained))]
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


def _build_part(
    models: Sequence[DistributedDataParallel],
    optim: OptimConfig,
    groups: RoleGroups,
    config: OptimizerConfig,
    tower_scale: float | None,
    *,
    is_expert: bool,
) -> MegatronOptimizer:
    """Build the optimizer of the experts or of all other parameters: the two are sharded over different ranks."""
    pgc = groups.pgc
    param_groups = _param_groups(models, optim, is_expert, tower_scale)
    optimizer: MegatronOptimizer
    if config.use_distributed_optimizer:
        inner = _make_adam(param_groups, optim)
        optimizer = ShardedAdam(
            inner,
            config,
            None,
            _init_adam_state,
            model_chunks=list(models),
            per_model_buffers={
                number: model.expert_parallel_buffers if is_expert else model.buffers
                for number, model in enumerate(models)
            },
            data_parallel_group=pgc.intra_expt_dp if is_expert else pgc.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=(pgc.tp_ep_pp if is_expert else pgc.mp).rank(),
            distributed_optimizer_instance_id=0,
        )
        optimizer.grad_stats_parallel_group = pgc.intra_dist_opt
        # Torch's Adam makes its state at the first step; megatron cannot save or load before that.
        _init_adam_state(inner)
    else:
        sgd = torch.optim.SGD(param_groups, lr=optim.lr, momentum=optim.momentum)
        if config.bf16:
            optimizer = Float16OptimizerWithFloat16Params(sgd, config, None, _init_sgd_state)
        else:
            optimizer = FP32Optimizer(sgd, config, _init_sgd_state)
        optimizer.grad_stats_parallel_group = pgc.tp_ep_pp if is_expert else pgc.mp
    optimizer.tp_group = pgc.expt_tp if is_expert else groups.tp
    return optimizer


def _make_adam(param_groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": optim.lr, "betas": (optim.betas[0], optim.betas[1]), "eps": optim.eps}
    dtypes = {name: getattr(torch, getattr(optim, name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if set(dtypes.values()) != {torch.float32}:
        return CompactAdam(param_groups, **options, **dtypes)
    if Adam is torch.optim.AdamW:
        return Adam(param_groups, fused=True, **options)
    return Adam(param_groups, adam_w_mode=True, **options)


def _is_expert(parameter: torch.Tensor) -> bool:
    """Whether megatron marks the parameter as divided by expert parallelism."""
    return not getattr(parameter, "allreduce", True)


class ShardedAdam(DistributedOptimizer):
    """Megatron's distributed optimizer over torch's AdamW, whose step counter is a tensor per parameter.

    Megatron 0.16 expects a tensor named "step" in a reshardable checkpoint, which it does not write there, and loads
    one tensor into all parameters, with which torch would count each step once per parameter.

    Megatron gathers the reshardable form whole on every replica, and one of them writes it. Here each replica writes
    its own part, under the same names.
    """

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[Any, Any]:
        if is_loading:
            return super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata)
        entries = {entry.data: entry for entry in model_sharded_state_dict.values()}
        state: dict[int, ShardedTensor] = {}
        for buckets_of_dtype in self.gbuf_ranges:
            for bucket in (bucket for buckets in buckets_of_dtype.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    own, entry = ranges["param"], entries[parameter]
                    tensors = self._get_main_param_and_optimizer_states(parameter)
                    for kind in ("param", *MOMENTS):
                        key, flat = f"optimizer.state.{kind}.{entry.key}", tensors[kind].detach().view(-1)
                        assert flat.numel() == own.end - own.start
                        for part in sharded_parts(entry, key, flat, own.start):
                            state[len(state)] = part
        return state

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        steps = {"step": state["step"]} if "step" in state else {}
        super()._set_main_param_and_optimizer_states(model_param, tensors | steps)

    def state_dict(self) -> dict[str, Any]:
        """Add the step counter, which megatron reads from torch's Adam only without Apex and Transformer Engine."""
        found = super().state_dict()
        steps = {float(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        if steps:
            (step,) = steps
            for group in found["optimizer"]["param_groups"]:
                group["step"] = step
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = torch.full_like(state["step"], state_dict["optimizer"]["param_groups"][0]["step"])


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


def _init_adam_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                if isinstance(optimizer, torch.optim.AdamW):
                    optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                dtypes = optimizer.dtypes if isinstance(optimizer, CompactAdam) else dict.fromkeys(MOMENTS)
                for name, dtype in dtypes.items():
                    optimizer.state[parameter][name] = torch.zeros_like(parameter.data, dtype=dtype)


def _init_sgd_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)


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
