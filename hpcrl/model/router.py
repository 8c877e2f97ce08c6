"""Routing of tokens to experts: the routers, losses that balance them, replayed choices, the layer around them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hpcrl.model.packed import PackedTokens

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from torch.distributed import ProcessGroup

    from hpcrl.model.shape import ModelShape


NOT_RECORDED = -1  # in place of an expert's number, where no choice was recorded and the router makes its own


def route(logits: Tensor, shape: ModelShape, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights fp32 (n, topk) and ids int64 (n, topk) of the experts chosen by router `logits` (n, experts).

    Scores are the softmax over the experts or each one's sigmoid; the choice is by score plus `bias` (experts,), the
    weights by score alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The weights are the scores, divided by their
    sum where the model normalises them (Jiang et al. 2024, arXiv:2401.04088, section 2.1, takes the softmax of the
    chosen logits, which is the same), times the model's factor.
    """
    scores = logits.float()
    scores = scores.softmax(-1) if shape.moe_score_function == "softmax" else scores.sigmoid()
    ids = choose(scores if bias is None else scores + bias, shape)
    weights = scores.gather(-1, ids)
    if shape.moe_norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * shape.moe_routed_scale, ids


def choose(scores: Tensor, shape: ModelShape) -> Tensor:
    """The best `moe_topk` experts by `scores` (n, experts), int64 (n, topk): of those in the best groups alone, where
    experts are in groups (DeepSeek-V2, arXiv:2405.04434, section 2.2.2, there by device)."""
    if shape.moe_num_groups > 1:
        groups = scores.unflatten(-1, (shape.moe_num_groups, -1))
        of_group = groups.topk(shape.moe_group_best, dim=-1).values.sum(-1)
        best = of_group.topk(shape.moe_topk_groups, dim=-1).indices
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, best, True)
        scores = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(shape.moe_topk, dim=-1).indices


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """The places of flat `ids` (n, topk) in the order of their experts, int64 (n * topk,), and how many each has."""
    flat = ids.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts).tolist()


@dataclass
class Routing:
    """What the routers of one micro-batch are told, and what they tell. S tokens of this context-parallel rank.

    sequences: int64 (S,), which sequence a token is of, N where it is padding. lengths: int64 (N,), tokens of each
    sequence on all ranks. layers: the model's layers with experts, in order. replayed: (S, layers, topk) int16, the
    experts to use, or `NOT_RECORDED`; None: the router's choice everywhere. losses: of the optimizer step, None outside of one.
    recorded: by layer, int16 (S / tp, topk), filled by the routers where it is a dict.
    """

    sequences: Tensor
    lengths: Tensor
    layers: tuple[int, ...]
    replayed: Tensor | None = None
    losses: RouterLosses | None = None
    recorded: dict[int, Tensor] | None = None

    def to(self, device: torch.device) -> Routing:
        replayed = None if self.replayed is None else self.replayed.to(device)
        return replace(self, sequences=self.sequences.to(device), lengths=self.lengths.to(device), replayed=replayed)


class RouterLosses:
    """What the routers of this rank add to the loss of one optimizer step, normalised by the global mini-batch.

    Both are sums over layers, as in megatron. `num_sequences` and `num_tokens` are those of the mini-batch on all
    replicas. `load` (layers, experts) counts the tokens that each expert was given.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        aux_coeff: float,
        z_coeff: float,
        num_sequences: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        self.aux_coeff, self.z_coeff = aux_coeff, z_coeff
        self.num_sequences, self.num_tokens = max(num_sequences, 1), max(num_tokens, 1)
        self.aux, self.z = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        self.load = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Means over layers of the losses without their weights, where these are not 0, and how uneven the load is:
        that of the busiest expert over the mean, by layer. Collective over the role's ranks, `group`."""
        everything = torch.cat([self.aux.view(1), self.z.view(1), self.load.flatten()])
        dist.all_reduce(everything, group=group)
        aux, z = everything[:2].tolist()
        load = everything[2:].view_as(self.load)
        imbalance = (load.amax(1) / load.mean(1).clamp(min=1e-9)).cpu()
        found = {
            "moe_load_imbalance/mean": float(imbalance.mean()),
            "moe_load_imbalance/max": float(imbalance.max()),
        }
        if self.aux_coeff:
            found["moe_aux_loss"] = aux / len(load)
        if self.z_coeff:
            found["moe_z_loss"] = z / len(load)
        return found


class Router(TopKRouter):
    """Megatron's, whose losses and replay keep their books in process-global state, with its own of both.

    Scores of experts may have a bias for the choice. Megatron trains it by a rule of its own, over its process-global
    groups; here it is a frozen parameter, so that it is loaded, saved and sent to the rollout engine as all others are,
    and has their dtype.
    """

    def __init__(
        self, config: TransformerConfig, shape: ModelShape, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config, pg_collection)
        self._shape = shape
        if shape.moe_score_bias:
            bias = torch.zeros(shape.num_experts, dtype=config.params_dtype)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _maintain_float32_expert_bias(self) -> None:
        """Left in the parameters' dtype: training and rollout choose alike."""

    def forward(self, input: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """input: (n, 1, hidden), the tokens of this rank. Weights (n, experts), 0 where an expert is not chosen, and
        which ones are, bool (n, experts)."""
        logits = self.gating(input).flatten(0, 1)
        layer = routing.layers.index(self.layer_number - 1)
        replayed = None if routing.replayed is None else self._mine(routing.replayed[:, layer], len(logits))
        choice = _Choice(self._shape, replayed)
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
        # Where the layer is to be computed again, its first pass has no gradient: each token is counted once.
        if routing.losses is not None and torch.is_grad_enabled():
            weights = _Added.apply(weights, self._losses(logits, chosen, layer, routing, routing.losses))
        return weights, chosen

    def _losses(self, logits: Tensor, chosen: Tensor, layer: int, routing: Routing, losses: RouterLosses) -> Tensor:
        """This rank's part of the layer's weighted losses: fp32, without dimensions.

        Aux loss of a sequence of T tokens, K of E experts each: sum over experts of f_i P_i with f_i = E / (K T) times
        the tokens that went to i, and P_i the mean probability of i (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6,
        taken per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), 1 under an even load; then the mean over
        sequences. A product of two means over a micro-batch would depend on who shares it. z-loss: the mean over tokens
        of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
        """
        sequences, lengths = self._mine(routing.sequences, len(logits)), routing.lengths
        load = logits.new_zeros(len(lengths) + 1, self.num_experts).index_add_(0, sequences, chosen.to(logits.dtype))
        load = load[:-1]  # of padding
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

    def _mine(self, of_tokens: Tensor, count: int) -> Tensor:
        """Of (S, ...) the `count` rows of this rank: all, or its share with sequence parallelism."""
        if count == len(of_tokens):
            return of_tokens
        return of_tokens[self.tp_group.rank() * count :][:count]


class _Choice:
    """What megatron asks for the experts of n tokens, in place of its `RouterReplay`; its own choice always scores a
    group of experts by its best topk / groups. replayed: int16 (n, topk)."""

    def __init__(self, shape: ModelShape, replayed: Tensor | None) -> None:
        self._shape = shape
        self._replayed = replayed
        self.ids: Tensor  # int64 (n, topk)

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts, (n, topk) each, of `scores` (n, experts)."""
        if self._replayed is None and self._shape.moe_num_groups == 1:
            best, self.ids = scores.topk(self._shape.moe_topk)  # unlike gather it does not keep all scores
            return best, self.ids
        self.ids = choose(scores, self._shape)
        if self._replayed is not None:
            self.ids = torch.where(self._replayed < 0, self.ids, self._replayed.to(self.ids.dtype))
        return scores.gather(1, self.ids), self.ids


class _Added(torch.autograd.Function):
    """`output` as it is; in the backward pass `loss` is a part of what is minimised."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)


# It warns of each layer whose mixture is not megatron's own class.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


class MixtureLayer(TransformerLayer):
    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # Of its arguments only the padding mask goes on to the mixture, and is for its router.
        kwargs["padding_mask"] = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Mixture(MoELayer):
    """The router's `Routing` comes as an argument, so that it is the micro-batch's own when a layer is computed again,
    after the forward pass of others."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Routing | None = None
    ) -> tuple[Tensor, None]:
        """(n, 1, hidden) of this rank's tokens -> the same, and no bias."""

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
