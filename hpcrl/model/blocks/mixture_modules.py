"""Modules of mixtures of experts: megatron's MoE layer with grouped products and an exchange of its own, and a decode
step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all,
    checkpoint,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hpcrl.kernels.grouped_experts import TOKENS, Biases, ExpertWeights, Operand, Order, grouped_linear, place_in_stack
from hpcrl.model.blocks.layers import BiasedColumnParallel, BiasedExpertOutput, FeedForwardStep, activate
from hpcrl.model.blocks.router import Router, Routing, route
from hpcrl.model.exact import exact_linear
from hpcrl.model.gpt import PackedTokens
from hpcrl.runtime.megatron_versions import mlp_submodules, use_mixture

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.model.adapters import LowRankUpdate
    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.mixture import MixtureOfExperts
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups

# The sum of the experts of x (n, hidden) by weights fp32 (n, k) and ids int64 (n, k) of this rank's experts.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedExperts:
    """Feed-forward networks of which each token takes some, and their sum by the router's weights.

    The weights multiply the input of the second product, as in megatron, in training and in rollout. Ranks that divide
    experts have a part of the sum each.
    """

    def __init__(
        self,
        block: MixtureOfExperts,
        fc1: Sequence[Tensor],
        fc2: Sequence[Tensor],
        fc1_bias: Sequence[Tensor] = (),
        fc2_bias: Sequence[Tensor] = (),
        *,
        adds_bias: bool = True,
        exact: bool = False,
    ) -> None:
        """Set up the experts' weights and biases.

        Args:
            adds_bias: whether this rank's part of the output has the second bias.
            exact: see `hpcrl.model.exact`.
        """
        self.fc1, self.fc2 = ExpertWeights(fc1), ExpertWeights(fc2)
        self._fc1_bias = Biases(fc1_bias) if fc1_bias else None
        self._fc2_bias = Biases(fc2_bias) if fc2_bias else None
        self._adds_bias = adds_bias
        self._block = block
        self._multiply = exact_linear if exact else None

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = self.order(ids)
        inner = self.biased(grouped_linear(self.fc1, order, x, operand=TOKENS, multiply=self._multiply), order)
        weights = order.of_rows(weights)
        scaled = Operand(function=self.scaled)
        outputs = grouped_linear(self.fc2, order, inner, weights, operand=scaled, multiply=self._multiply)
        return self.sum(outputs, order, weights)

    @property
    def needs_host(self) -> bool:
        is_apart = self.fc1.needs_host or self.fc2.needs_host or self.fc1.is_reversed != self.fc2.is_reversed
        return self._multiply is not None or is_apart

    @property
    def is_current(self) -> bool:
        return self.fc1.is_current and self.fc2.is_current

    def order(self, ids: Tensor) -> Order:
        return Order(ids, len(self.fc1.each), self.fc1.is_reversed)

    def biased(self, inner: Tensor, order: Order) -> Tensor:
        return inner if self._fc1_bias is None else self._fc1_bias.add(inner, order)

    def scaled(self, inner: Tensor, weights: Tensor) -> Tensor:
        """Return the activation of `inner`, times the weights of rows (R,)."""
        return _activate(self._block, inner, weights)

    def sum(self, outputs: Tensor, order: Order, weights: Tensor) -> Tensor:
        if self._fc2_bias is not None:
            outputs = self._fc2_bias.add(outputs, order, weights, counts=self._adds_bias)
        return order.sum(outputs)


def _activate(block: MixtureOfExperts, x: Tensor, weights: Tensor | None = None) -> Tensor:
    name, constants = block.activation
    return activate(x, name, block.is_gated, *constants, weights=weights)


class AdaptedExperts:
    """Frozen experts with low-rank updates, as `LowRankUpdate` computes them for each."""

    def __init__(self, experts: GroupedExperts, fc1: Sequence[LowRankUpdate], fc2: Sequence[LowRankUpdate]) -> None:
        self._experts, self._of_fc1, self._of_fc2 = experts, _Updates(fc1), _Updates(fc2)
        self._model = (*fc1, *fc2)[0].model

    @property
    def is_enabled(self) -> bool:
        return self._model.uses_adapters

    @property
    def is_current(self) -> bool:
        return self._of_fc1.is_current and self._of_fc2.is_current

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = self._experts.order(ids)
        weights = order.of_rows(weights)
        active = self._experts.scaled(self._experts.biased(self._inner(x, order), order), weights)
        outputs = self._of_fc2.add(grouped_linear(self._experts.fc2, order, active), active, order)
        return self._experts.sum(outputs, order, weights)

    def _inner(self, x: Tensor, order: Order) -> Tensor:
        rows = order.gather(x)
        return self._of_fc1.add(grouped_linear(self._experts.fc1, order, rows), rows, order)


class _Updates:
    """The low-rank updates of one linear layer of all experts."""

    def __init__(self, updates: Sequence[LowRankUpdate]) -> None:
        """Collect the adapters of all experts.

        Args:
            updates: one for each expert; empty without adapters.
        """
        self._factors: dict[str, tuple[ExpertWeights, ...]] = {}
        for first in updates[:1]:
            self._scale, self._rows = first.scale, first.rows
            for name in first.adapters:
                adapters = [update.adapters[name] for update in updates]
                factors = [adapter.lora_A for adapter in adapters], [adapter.lora_B for adapter in adapters]
                self._factors[name] = tuple(ExpertWeights(each) for each in factors)

    @property
    def is_current(self) -> bool:
        return all(factor.is_current for factors in self._factors.values() for factor in factors)

    def add(self, product: Tensor, x: Tensor, order: Order) -> Tensor:
        """Return `product` (R, m) plus the updates of the layer's input `x` (R, k)."""
        if not self._factors:
            return product
        updates = []
        for name, count in self._rows.items():
            if name in self._factors:
                a, b = self._factors[name]
                updates.append(grouped_linear(b, order, grouped_linear(a, order, x) * self._scale))
            else:
                updates.append(product.new_zeros(len(product), count))
        update = updates[0] if len(updates) == 1 else torch.cat(updates, dim=1)
        del updates
        return product + update


class Exchange:
    """Sends tokens to the ranks of their experts, and sums up what comes back.

    Ranks of `ep` have different experts; those of `etp` a part of each, and gather their tokens.
    """

    def __init__(self, num_experts: int, groups: ProcessGroupCollection) -> None:
        self._num_experts, self._ep, self._etp, self._all = num_experts, groups.ep, groups.expt_tp, groups.tp_ep

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Experts) -> Tensor:
        """Map x (n, hidden), weights fp32 and ids int64 (n, k) to (n, hidden). The host waits once, for the numbers of
        rows, if there is more than one rank."""
        if self._ep.size() == self._etp.size() == 1:
            return experts(x, weights, ids)
        order = Order(ids, self._num_experts)
        received = self._received(order)  # (etp, ep, experts of this rank)
        sent, received_by_rank, gathered = self._splits(order, received)
        rows = all_to_all(self._ep, order.gather(x), received_by_rank, sent)
        of_rows = all_to_all(self._ep, order.of_rows(weights), received_by_rank, sent)
        if self._etp.size() > 1:
            rows, of_rows = (
                gather_from_sequence_parallel_region(part, group=self._etp, output_split_sizes=gathered)
                for part in (rows, of_rows)
            )
        # Rows come by rank of etp, by rank of ep, and by expert.
        ends = received.flatten().cumsum(0)
        places = torch.arange(len(rows), device=rows.device)
        ids = torch.searchsorted(ends, places, right=True) % received.size(2)
        output = experts(rows, of_rows.unsqueeze(1), ids.unsqueeze(1))
        if self._etp.size() > 1:
            output = reduce_scatter_to_sequence_parallel_region(
                output.to(weights.dtype), group=self._etp, input_split_sizes=gathered
            ).to(x.dtype)
        return order.sum(all_to_all(self._ep, output, sent, received_by_rank))

    def _received(self, order: Order) -> Tensor:
        """Return the rows that come to this rank's experts, int64 (etp, ep, experts of this rank), with the ranks that
        send them."""
        counts = torch.diff(order.ends.long(), prepend=order.ends.new_zeros(1, dtype=torch.int64))
        of_ranks = counts.new_empty(self._all.size(), self._num_experts)
        dist.all_gather_into_tensor(of_ranks, counts, group=self._all)
        by_rank = of_ranks.view(self._ep.size(), self._etp.size(), self._ep.size(), -1)
        return by_rank[:, :, self._ep.rank()].transpose(0, 1).contiguous()

    def _splits(self, order: Order, received: Tensor) -> list[list[int]]:
        """Return the rows that this rank sends to each rank of ep, those it receives of each, and those that it and the
        ranks of etp have then."""
        ends = order.ends.long().view(self._ep.size(), -1)[:, -1]
        sent = torch.diff(ends, prepend=ends.new_zeros(1))
        by_rank = received.sum(2)
        numbers = torch.cat([sent, by_rank[self._etp.rank()], by_rank.sum(1)])
        sizes = [self._ep.size(), self._ep.size(), self._etp.size()]
        return [part.tolist() for part in numbers.cpu().split(sizes)]


def use_mixture_of_experts(spec: ModuleSpec, block: MixtureOfExperts, groups: RoleGroups, *, exact: bool) -> None:
    """Set the mixture of experts and its router in a layer, in place."""
    spec.module = MixtureLayer
    router = partial(Router, block=block, exact=exact)
    use_mixture(spec, Mixture, router, groups.pgc, block=block, exact=exact)
    if block.has_bias:
        experts, *_ = mlp_submodules(spec)
        experts.linear_fc1, experts.linear_fc2 = BiasedColumnParallel, BiasedExpertOutput


# Megatron warns about each layer whose MoE class is not its own.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


class MixtureLayer(TransformerLayer):
    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # The padding mask is the only argument that reaches the MoE layer, and carries the routing here.
        kwargs["padding_mask"] = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Mixture(MoELayer):
    """Megatron's MoE layer with its modules and their weights, and `GroupedExperts` in place of their forward passes.

    `Routing` is an argument, so that it is that of the right micro-batch when a layer is recomputed after the forward
    pass of others.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        block: MixtureOfExperts,
        exact: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection, **options)
        assert pg_collection is not None
        self.token_dispatcher = None  # megatron's constructor makes one
        self._block, self._etp, self._exact = block, pg_collection.expt_tp, exact
        self._exchange = Exchange(block.num_experts, pg_collection)
        # The first and the second layers of this rank's experts, whose forward passes are not used.
        experts = self.experts.local_experts
        self._layers = [expert.linear_fc1 for expert in experts], [expert.linear_fc2 for expert in experts]
        self._grouped: GroupedExperts | None = None
        self._adapted: AdaptedExperts | None = None

    def place_weights(self) -> None:
        """Place the same weights of all experts, and of their adapters, in one memory each."""
        for layers in self._layers:
            place_in_stack([layer.weight for layer in layers])
            for layer in layers:
                # See hpcrl.kernels.fp32_product.
                layer.weight.sums_in_fp32 = self.config.gradient_accumulation_fusion
            adapters = [[*layer.update.adapters.values()] for layer in layers if hasattr(layer, "update")]
            for of_experts in zip(*adapters, strict=True):
                for factors in zip(*(adapter.parameters() for adapter in of_experts), strict=True):
                    place_in_stack(factors)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Routing | None = None
    ) -> tuple[Tensor, None]:
        """(n, 1, hidden) of this rank's tokens -> the same shape, and no bias."""
        self._wait_for_weights()
        experts = self._experts()

        def compute(hidden_states: Tensor) -> Tensor:
            shared = self.shared_experts_compute(hidden_states)
            weights, ids = self.router(hidden_states, padding_mask)
            output = self._exchange(hidden_states.flatten(0, 1), weights, ids, experts).view(hidden_states.shape)
            return output if shared is None else output + shared

        if self.moe_layer_recompute:
            return checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _wait_for_weights(self) -> None:
        """Run the hooks of the experts' layers, in which megatron waits for weights that it gathers."""
        if self._layers[0][0]._forward_pre_hooks:
            for layer in (layer for layers in self._layers for layer in layers):
                for hook in layer._forward_pre_hooks.values():
                    hook(layer, ())

    def _experts(self) -> Experts:
        if not all(found is not None and found.is_current for found in (self._grouped, self._adapted or self._grouped)):
            weights = [[layer.weight for layer in layers] for layers in self._layers]
            biases = [[layer.bias for layer in layers] for layers in self._layers] if self._block.has_bias else []
            options = {"adds_bias": self._etp.rank() == 0, "exact": self._exact}
            self._grouped = GroupedExperts(self._block, *weights, *biases, **options)
            updates = [[layer.update for layer in layers if hasattr(layer, "update")] for layers in self._layers]
            self._adapted = AdaptedExperts(self._grouped, *updates) if any(updates) else None
        if self._adapted is not None and self._adapted.is_enabled:
            return self._adapted
        assert self._grouped is not None
        return self._grouped


class MixtureStep:
    """A mixture of experts in rollout."""

    def __init__(
        self, block: MixtureOfExperts, weight: Callable[[str], Tensor], linear: Linear, tp: TensorParallel
    ) -> None:
        self._block, self._linear, self.num_chosen = block, linear, block.topk
        self._router = weight("mlp.router.weight")
        self._router_bias = weight("mlp.router.bias") if block.has_bias else None
        self._bias = weight("mlp.router.expert_bias") if block.has_score_bias else None
        self._shared = None
        self._shared_gate = weight("mlp.shared_experts.gate_weight") if block.has_shared_gate else None
        if block.shared_ffn_hidden_size:
            fc1, fc2 = (weight(f"mlp.shared_experts.linear_{fc}.weight") for fc in ("fc1", "fc2"))
            self._shared = FeedForwardStep(fc1, fc2, linear, partial(_activate, block))
        kinds = ("fc1.weight", "fc2.weight", *(("fc1.bias", "fc2.bias") if block.has_bias else ()))
        names = [f"mlp.experts.local_experts.{number}.linear_" for number in range(block.num_experts)]
        of_experts = ([weight(name + kind) for name in names] for kind in kinds)
        self._experts = GroupedExperts(block, *of_experts, adds_bias=tp.rank == 0, exact=tp.exact)

    @property
    def needs_host(self) -> bool:
        """Whether a step reads numbers of the device, so that it cannot be captured in a CUDA graph."""
        return self._experts.needs_host

    def __call__(self, x: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        """Map x (n, hidden) to this rank's part of the weighted sum of each token's experts (n, hidden). Appends the
        experts, int64 (n, topk), to `chosen`."""
        mixed = self._experts(x, *self.route(x, chosen))
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = shared * self._linear(x, self._shared_gate).sigmoid()
            mixed += shared
        return mixed

    def route(self, x: Tensor, chosen: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return weights and ids of each token's experts."""
        logits = self._linear(x.float(), self._router.float())
        if self._router_bias is not None:
            logits = logits + self._router_bias.float()
        weights, ids = route(logits, self._block, self._bias)
        if chosen is not None:
            chosen.append(ids)
        return weights, ids
