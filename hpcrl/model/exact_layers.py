"""Megatron's parallel linear layers in exact mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from hpcrl.model.exact import exact_linear, exact_sum


def use_exact_linear(model: torch.nn.Module) -> None:
    """Let every parallel linear layer of `model` (without sequence parallelism) compute by `exact_linear`."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module._forward_impl = partial(_column_product, module)
        elif isinstance(module, RowParallelLinear):
            module.forward = partial(_row_parallel, module)


def _column_product(
    layer: ColumnParallelLinear, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    if options["allreduce_dgrad"]:  # megatron sums the input's gradient over ranks in the product's backward pass
        input = copy_to_tensor_model_parallel_region(input, group=layer.tp_group)
    product = exact_linear(input, weight)
    return product if bias is None else product + bias


def _row_parallel(layer: RowParallelLinear, input: Tensor) -> tuple[Tensor, None]:
    return _SumOverRanks.apply(exact_linear(input, layer.weight), layer.tp_group), None


class _SumOverRanks(torch.autograd.Function):
    """Every rank goes on with the same sum, so the gradient of each part is the sum's."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return exact_sum(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
