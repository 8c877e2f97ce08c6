"""Gradients summed over the ranks of a role, once all micro-batches have been through their backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over replicas and tied embeddings, without its division by the token count."""
    finalize_model_grads(model, None, **kwargs)
    _sum_over_expert_tp(model, kwargs["pg_collection"].expt_tp)


def _sum_over_expert_tp(models: list[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Gradients of what the tensor-parallel ranks of an expert all hold, of which each has the part of its columns;
    megatron has no such parameters."""
    if group.size() == 1:
        return
    parameters: Iterator[Any] = (parameter for model in models for parameter in model.parameters())
    grads = [each.main_grad for each in parameters if getattr(each, "expert_tensor_parallel", False)]
    if grads:
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(summed)
