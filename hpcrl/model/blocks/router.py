"""Routing of tokens to experts: routers, load-balancing losses, replayed choices, and the MoE layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hpcrl.kernels.grouped_experts import Experts, mixture
from hpcrl.model.blocks.layers import BiasedColumnParallel, BiasedExpertOutput, FeedForwardStep, activate
from hpcrl.model.gpt import PackedTokens
from hpcrl.runtime.megatron_versions import mlp_submodules, use_mixture

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch.distributed import ProcessGroup

    from hpcrl.config.schema import MoeConfig
    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.feed_forward import Activation
    from hpcrl.model.blocks.mixture import MixtureOfExperts, RoutedExperts
    from hpcrl.model.tensor_parallel import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


NOT_RECORDED = -1  # in place of an expert's number: no choice was recorded, the router chooses


def route(logits: Tensor, block: MixtureOfExperts, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights fp32 (n, topk) and ids int64 (n, topk) of the experts chosen by router `logits` (n, experts).

    Scores are the softmax over the experts or each one's sigmoid; the choice is by score plus `bias` (experts,), the
    weights by score only (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The weights are the scores, divided by their
    sum if the model normalises them (Jiang et al. 2024, arXiv:2401.04088, section 2.1, takes the softmax of the chosen
    logits, which is the same), times the model's factor.
    """
    scores = logits.float()
    scores = scores.softmax(-1) if block.score_function == "softmax" else scores.sigmoid()
    ids = choose(scores if bias is None else scores + bias, block)
    weights = scores.gather(-1, ids)
    if block.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * block.routed_scale, ids


def choose(scores: Tensor, block: MixtureOfExperts) -> Tensor:
    """Return the best `topk` experts by `scores` (n, experts), int64 (n, topk). If experts are in groups, only
    those in the best groups (DeepSeek-V2, arXiv:2405.04434, section 2.2.2, there by device)."""
    if block.num_groups > 1:
        groups = scores.unflatten(-1, (block.num_groups, -1))
        of_group = groups.topk(block.group_best, dim=-1).values.sum(-1)
        best = of_group.topk(block.topk_groups, dim=-1).indices
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, best, True)
        scores = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(block.topk, dim=-1).indices


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Return the places of flat `ids` (n, topk) sorted by expert, int64 (n * topk,), and the count of each expert."""
    flat = ids.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts).tolist()


def _activated(name: Activation, is_gated: bool, constants: tuple[float, ...], x: Tensor) -> Tensor:
    return activate(x, name, is_gated, *constants)


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
        name, constants = block.activation
        activation = partial(_activated, name, block.is_gated, constants)
        if block.shared_ffn_hidden_size:
            fc1, fc2 = (weight(f"mlp.shared_experts.linear_{fc}.weight") for fc in ("fc1", "fc2"))
            self._shared = FeedForwardStep(fc1, fc2, linear, activation)

        def of_experts(name: str) -> list[Tensor]:
            return [weight(f"mlp.experts.local_experts.{number}.linear_{name}") for number in range(block.num_experts)]

        fc1s, fc2s = of_experts("fc1.weight"), of_experts("fc2.weight")
        # The ranks' parts of the output are summed.
        biases = (
            of_experts("fc1.bias") if block.has_bias else [],
            of_experts("fc2.bias") if block.has_bias and tp.rank == 0 else [],
        )
        self._experts = [
            FeedForwardStep(fc1, fc2, linear, activation, *of_expert)
            for fc1, fc2, *of_expert in zip_longest(fc1s, fc2s, *biases)
        ]
        self._activation = activation
        # A CPU does not wait for counts, and its grouped product also takes time for experts without tokens.
        self._grouped = None if self._router.device.type == "cpu" else Experts.of(fc1s, fc2s, *biases)

    def __call__(self, x: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        """Map x (n, hidden) to this rank's part of the weighted sum of each token's experts (n, hidden). Appends the
        experts, int64 (n, topk), to `chosen`."""
        weights, ids = self.route(x, chosen)
        if self._grouped is not None:
            mixed = mixture(x, weights, ids, self._grouped, self._activation)
        else:
            mixed = self._mixed(x, weights, ids)
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

    def _mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        places, counts = by_expert(ids, self._block.num_experts)
        parts = x[places // self._block.topk].split(counts)
        outputs = [expert(part) for expert, part in zip(self._experts, parts, strict=True) if len(part)]
        weighted = x.new_empty(len(places), x.size(1))
        weighted[places] = torch.cat(outputs)
        return (weighted.unflatten(0, weights.shape) * weights.unsqueeze(-1).to(x.dtype)).sum(1)


@dataclass
class Routing:
    """Input and output of the routers of one micro-batch. S tokens of this context-parallel rank.

    sequences: int64 (S,), the sequence of a token, N for padding. lengths: int64 (N,), tokens of each sequence on all
    ranks. layers: the model's MoE layers, in order. replayed: (S, layers, topk) int16, the experts to use, or
    `NOT_RECORDED`; None: the router chooses. losses: of the optimizer step, None outside of one. recorded: by layer,
    int16 (S / tp, topk), filled by the routers if it is a dict.
    """

    sequences: Tensor
    lengths: Tensor
    layers: tuple[int, ...]
    replayed: Tensor | None = None
    losses: RouterLosses | None = None
    recorded: dict[int, Tensor] | None = None


class RouterLosses:
    """Losses that the routers of this rank add to one optimizer step, normalised by the global mini-batch.

    Both are sums over layers, as in megatron. `num_sequences` and `num_tokens` are those of the mini-batch on all
    replicas. `load` (layers, experts) counts the tokens of each expert.
    """

    def __init__(
        self, routed: RoutedExperts, moe: MoeConfig | None, num_sequences: int, num_tokens: int, device: torch.device
    ) -> None:
        """moe: the coefficients of the losses; None: 0."""
        self.aux_coeff, self.z_coeff = (moe.aux_loss_coeff, moe.z_loss_coeff) if moe is not None else (0.0, 0.0)
        self.num_sequences, self.num_tokens = max(num_sequences, 1), max(num_tokens, 1)
        self.aux, self.z = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        self.load = torch.zeros(len(routed.layers), routed.num_experts, dtype=torch.float64, device=device)

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Return means over layers of the losses without their coefficients, where these are not 0, and the load
        imbalance: the largest expert's load over the mean, by layer. Collective over the role's ranks, `group`."""
        totals = torch.cat([self.aux.view(1), self.z.view(1), self.load.flatten()])
        dist.all_reduce(totals, group=group)
        totals = totals.cpu()
        aux, z = totals[:2].tolist()
        load = totals[2:].view(self.load.shape)
        imbalance = load.amax(1) / load.mean(1).clamp(min=1e-9)
        found = {"moe_load_imbalance/mean": float(imbalance.mean()), "moe_load_imbalance/max": float(imbalance.max())}
        if self.aux_coeff:
            found["moe_aux_loss"] = aux / len(load)
        if self.z_coeff:
            found["moe_z_loss"] = z / len(load)
        return found


class Router(TopKRouter):
    """Megatron's router with losses and replay that do not use process-global state.

    Scores of experts may have a bias for the choice. Megatron trains it by its own rule, over its process-global
    groups; here it is a frozen parameter, so that it is loaded, saved and sent to the rollout engine like all others,
    in their dtype.
    """

    def __init__(
        self, config: TransformerConfig, block: MixtureOfExperts, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config, pg_collection)
        self._block = block
        if block.has_bias:
            self.bias = torch.nn.Parameter(torch.empty(block.num_experts, dtype=config.params_dtype))
            # Each rank has the gradient of its tokens.
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if block.has_score_bias:
            bias = torch.zeros(block.num_experts, dtype=config.params_dtype)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the parameters' dtype, so that training and rollout choose alike."""

    def forward(self, input: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Map this rank's tokens (n, 1, hidden) to weights (n, experts), 0 for experts that are not chosen, and a bool
        mask of the chosen ones (n, experts)."""
        logits = self.gating(input).flatten(0, 1)
        layer = routing.layers.index(self.layer_number - 1)
        replayed = None if routing.replayed is None else self._local_rows(routing.replayed[:, layer], len(logits))
        choice = _ExpertChoice(self._block, replayed)
        weights, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=choice,
        )
        if routing.recorded is not None:
            routing.recorded[layer] = choice.ids.to(torch.int16)
        # With recomputation the first pass has no gradient, so each token is counted once.
        if routing.losses is not None and torch.is_grad_enabled():
            weights = _AddLoss.apply(weights, self._losses(logits, chosen, layer, routing, routing.losses))
        return weights, chosen

    def _losses(self, logits: Tensor, chosen: Tensor, layer: int, routing: Routing, losses: RouterLosses) -> Tensor:
        """Return this rank's part of the layer's weighted losses, a scalar in fp32.

        Aux loss of a sequence of T tokens, K of E experts each: sum over experts of f_i P_i with f_i = E / (K T) times
        the tokens that went to i, and P_i the mean probability of i (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6,
        taken per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), 1 under an even load; then the mean over
        sequences. A product of two means over a micro-batch would depend on the other sequences in it. z-loss: the mean
        over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
        """
        sequences, lengths = self._local_rows(routing.sequences, len(logits)), routing.lengths
        load = logits.new_zeros(len(lengths) + 1, self.num_experts).index_add_(0, sequences, chosen.to(logits.dtype))
        load = load[:-1]  # drop padding
        losses.load[layer] += load.sum(0)
        total = logits.new_zeros(())
        if losses.aux_coeff:
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(load, group=self.tp_cp_group)
            per_token = load * (self.num_experts / self.topk) / lengths.unsqueeze(1).square()
            per_token = torch.cat([per_token, per_token.new_zeros(1, self.num_experts)])
            aux = (self._probabilities(logits) * per_token[sequences]).sum() / losses.num_sequences
            losses.aux += aux.detach()
            total = total + losses.aux_coeff * aux
        if losses.z_coeff:
            squares = logits.logsumexp(-1).square()
            z = (squares * (sequences < len(lengths))).sum() / losses.num_tokens
            losses.z += z.detach()
            total = total + losses.z_coeff * z
        return total

    def _probabilities(self, logits: Tensor) -> Tensor:
        if self.score_function == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def _local_rows(self, of_tokens: Tensor, count: int) -> Tensor:
        """Return the `count` rows of this rank, of (S, ...): all, or its part under sequence parallelism."""
        if count == len(of_tokens):
            return of_tokens
        return of_tokens[self.tp_group.rank() * count :][:count]


class _ExpertChoice:
    """Replacement of megatron's `RouterReplay`: chooses the experts of n tokens. Megatron's own choice always scores a
    group by its best topk / groups experts. replayed: int16 (n, topk)."""

    def __init__(self, block: MixtureOfExperts, replayed: Tensor | None) -> None:
        self._block = block
        self._replayed = replayed
        self.ids: Tensor  # int64 (n, topk)

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the experts, (n, topk) each, from `scores` (n, experts)."""
        if self._replayed is None and self._block.num_groups == 1:
            best, self.ids = scores.topk(self._block.topk)  # unlike gather it does not keep all scores
            return best, self.ids
        self.ids = choose(scores, self._block)
        if self._replayed is not None:
            self.ids = torch.where(self._replayed < 0, self.ids, self._replayed.to(self.ids.dtype))
        return scores.gather(1, self.ids), self.ids


class _AddLoss(torch.autograd.Function):
    """Identity of `output`; in the backward pass `loss` is added to what is minimised."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)


# Megatron warns about each layer whose MoE class is not its own.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


def use_router(spec: ModuleSpec, block: MixtureOfExperts, groups: RoleGroups) -> None:
    """Set the mixture of experts and its router in a layer, in place."""
    spec.module = MixtureLayer
    use_mixture(spec, Mixture, partial(Router, block=block), groups.pgc)
    if block.has_bias:
        experts, *_ = mlp_submodules(spec)
        experts.linear_fc1, experts.linear_fc2 = BiasedColumnParallel, BiasedExpertOutput


class MixtureLayer(TransformerLayer):
    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # The padding mask is the only argument that reaches the MoE layer, and carries the routing here.
        kwargs["padding_mask"] = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Mixture(MoELayer):
    """MoE layer whose `Routing` is an argument, so that it is that of the right micro-batch when a layer is recomputed
    after the forward pass of others."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Routing | None = None
    ) -> tuple[Tensor, None]:
        """(n, 1, hidden) of this rank's tokens -> the same shape, and no bias."""

        def compute(hidden_states: Tensor) -> Tensor:
            shared = self.shared_experts_compute(hidden_states)
            weights, chosen = self.router(hidden_states, padding_mask)
            hidden_states, weights = self.preprocess(hidden_states, weights, chosen)
            dispatched, weights = self.dispatch(hidden_states, weights)
            output, _ = self.routed_experts_compute(dispatched, weights)
            return self.postprocess(self.combine(output), shared)

        if self.moe_layer_recompute:
            return checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None
