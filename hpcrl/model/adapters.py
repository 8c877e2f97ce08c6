"""Low-rank adapters of megatron's linear layers, and weights with merged adapters.

Each adapter is named like Hugging Face's projection: q_proj next to linear_qkv, gate_proj next to linear_fc1. Tensor
parallelism splits A or B as it splits the projection's input or output, and each rank has all of the other factor;
communicated tensors have the adapters' rank as width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

from hpcrl.model.blocks.layers import SplitModule, mark
from hpcrl.model.shape import FACTORS, Lora, is_adapter

if TYPE_CHECKING:
    from hpcrl.model.gpt import PackedGPT
    from hpcrl.model.params import Shard


class Adapter(SplitModule):
    """This rank's parts of A (r, in) and B (out, r) of one projection, which is `rows` rows of the frozen `layer`."""

    def __init__(self, layer: Any, lora: Lora, rows: int, *, is_row_parallel: bool) -> None:
        super().__init__()
        self.tp_group = layer.tp_group
        options = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.lora_A = torch.nn.Parameter(torch.empty(lora.rank, layer.weight.size(1), **options))
        self.lora_B = torch.nn.Parameter(torch.empty(rows, lora.rank, **options))
        self.split_axes = {"lora_A": 1} if is_row_parallel else {"lora_B": 0}
        replicated = self.lora_B if is_row_parallel else self.lora_A
        # Each rank has a part of this factor's gradient: that of its tokens, or in an expert of its columns.
        is_expert = layer.is_expert
        mark(replicated, sequence_parallel=layer.sequence_parallel and not is_expert, expert_tensor_parallel=is_expert)


# By row and sequence parallelism. The first two copy the input of each rank's rows of B, and sum the ranks' parts of
# its gradient in the backward pass; the others sum the products of each rank's columns of A.
OVER_RANKS = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}


class LowRankUpdate:
    """A forward hook of a linear layer that adds the updates of the layer's projections to its output."""

    def __init__(self, model: PackedGPT, layer: Any, shard: Shard, lora: Lora) -> None:
        self.model, self.scale = model, lora.scale
        self.blocks, self.rows = shard.projection_rows(layer.weight.size(0))
        self.is_row_parallel = isinstance(layer, RowParallelLinear)
        self.adapters = {
            name: Adapter(layer, lora, self.blocks * rows, is_row_parallel=self.is_row_parallel)
            for name, rows in self.rows.items()
            if name in lora.targets
        }

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not self.model.uses_adapters:
            return output
        product, bias = output
        return product + self._update(layer, inputs[0]), bias

    def _update(self, layer: Any, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the shapes of the layer's input and output."""
        adapters = self.adapters.values()
        low = linear(x, torch.cat([adapter.lora_A for adapter in adapters])) * self.scale
        if not layer.is_expert:  # the outputs of experts' ranks are summed
            low = OVER_RANKS[self.is_row_parallel, layer.sequence_parallel](low, group=layer.tp_group)
        inner = dict(zip(self.adapters, low.chunk(len(adapters), dim=-1), strict=True))
        updates = [
            linear(inner[name], self.adapters[name].lora_B)
            if name in inner
            else low.new_zeros(*low.shape[:-1], self.blocks * rows)
            for name, rows in self.rows.items()
        ]
        if len(updates) == 1:
            return updates[0]
        return torch.cat([update.unflatten(-1, (self.blocks, -1)) for update in updates], dim=-1).flatten(-2)


def add_adapters(model: PackedGPT, shards: Iterable[Shard], lora: Lora) -> None:
    """Freeze the model and add adapters to the linear layers of its decoder; their values are not initialised.

    Args:
        shards: shards of the model; those of adapters have no projections.
    """
    model.requires_grad_(False)
    for shard in shards:
        if not shard.projections or len(shard.global_shape) != 2:
            continue
        layer = model.get_submodule(path := shard.local_name.removesuffix(".weight"))
        update = LowRankUpdate(model, layer, shard, lora)
        for name, adapter in update.adapters.items():
            model.get_submodule(path.rpartition(".")[0]).add_module(name, adapter)
        if update.adapters:
            layer.update = update  # experts compute theirs together
            layer.register_forward_hook(update)
    if model.pre_process and model.config.recompute_granularity is not None:
        # Recomputation produces gradients only if its input requires one.
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


class MergedWeights(Mapping[str, Tensor]):
    """A rank's weights W + alpha / r B A, by global names, from those of the base and the adapters.

    Each is computed on access and kept until the next one, so that no second model is in memory.
    """

    def __init__(self, weights: Mapping[str, Tensor], shards: Iterable[Shard], lora: Lora) -> None:
        """Find the weights that have adapters.

        Args:
            shards: this rank's parts of the weights and the adapters.
        """
        self._weights, self._lora = weights, lora
        self._adapted = {
            shard.name: shard
            for shard in shards
            if len(shard.global_shape) == 2 and any(it.name in lora.targets for it in shard.projections)
        }
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapted:
            return self._weights[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory first
            self._last = name, self._merged(self._weights[name], self._adapted[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @torch.no_grad()
    def _merged(self, weight: Tensor, shard: Shard) -> Tensor:
        """Merge in fp32, and round once."""
        merged, parent = weight.to(torch.float32, copy=True), shard.name.removesuffix(".weight").rpartition(".")[0]
        blocks, rows = shard.projection_rows(len(weight))
        by_projection = merged.unflatten(0, (blocks, -1)).split(list(rows.values()), dim=1)
        for projection, part in zip(rows, by_projection, strict=True):
            if projection in self._lora.targets:
                a, b = (self._weights[f"{parent}.{projection}.{factor}"].float() for factor in FACTORS)
                part.baddbmm_(b.unflatten(0, (blocks, -1)), a.expand(blocks, -1, -1), alpha=self._lora.scale)
        return merged.to(weight.dtype)
