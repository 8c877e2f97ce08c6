"""Gradients after the backward passes of all micro-batches: summation over a role's ranks, norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hpcrl.engine.optim import optimizer_parts
from hpcrl.runtime import platform
from hpcrl.runtime.megatron_versions import grads_for_norm


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over replicas and tied embeddings, without its division by the token count."""
    finalize_model_grads(model, None, **kwargs)
    _sum_over_expert_tp(model, kwargs["pg_collection"].expt_tp)


def _sum_over_expert_tp(models: list[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Sum gradients of parameters that all tensor-parallel ranks of an expert hold.

    Each rank has the part of its columns; megatron has no such parameters.
    """
    if group.size() == 1:
        return
    parameters: Iterator[Any] = (parameter for model in models for parameter in model.parameters())
    grads = [each.main_grad for each in parameters if getattr(each, "expert_tensor_parallel", False)]
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
