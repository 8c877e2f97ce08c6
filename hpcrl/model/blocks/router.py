"""Routing of tokens to experts: routers, load-balancing losses, replayed choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from hpcrl.model.blocks.layers import mark
from hpcrl.model.exact import exact_linear

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from torch.distributed import ProcessGroup

    from hpcrl.config.schema import MoeConfig
    from hpcrl.model.blocks.mixture import MixtureOfExperts, RoutedExperts


def route(
    logits: Tensor, block: MixtureOfExperts, bias: Tensor | None = None, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights fp32 (n, topk) and ids int64 (n, topk) of the experts chosen by router `logits` (n, experts).

    Scores are the softmax over the experts or each one's sigmoid; the choice is by score plus `bias` (experts,), the
    weights by score only (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The weights are the scores, divided by their
    sum if the model normalises them (Jiang et al. 2024, arXiv:2401.04088, section 2.1, takes the softmax of the chosen
    logits, which is the same), times the model's factor.

    Args:
        replayed: int16 (n, topk), the experts to use, or `NOT_RECORDED`.
    """
    scores, by_scores_only = logits.float(), bias is None and block.num_groups == 1
    if not block.is_plain:
        scores = scores.softmax(-1) if block.score_function == "softmax" else scores.sigmoid()
    if by_scores_only and replayed is None:
        weights, ids = scores.topk(block.topk, dim=-1)  # unlike gather it does not keep all scores
    else:
        ids = choose(scores if bias is None else scores + bias, block)
        if replayed is not None:
            ids = torch.where(replayed < 0, ids, replayed.to(ids.dtype))
        weights = scores.gather(-1, ids)
    if block.norm_topk_prob:
        weights = weights.softmax(-1) if block.is_plain else weights / weights.sum(-1, keepdim=True)
    return weights if block.routed_scale == 1.0 else weights * block.routed_scale, ids


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


@dataclass
class Routing:
    """Input and output of the routers of one micro-batch. S tokens of this context-parallel rank.

    sequences: int64 (S,), the sequence of a token, N for padding. lengths: int64 (N,), tokens of each sequence on all
    ranks. layers: the model's MoE layers, in order. replayed: (S, layers, topk) int16, the experts to use, or
    `NOT_RECORDED`; None: the router chooses. losses: what the optimizer step adds up, None outside of a step.
    recorded: the chosen experts of each layer, int16 (S / tp, topk), which routers add to the dict; None: they do not.
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
        """Begin with losses and loads of 0.

        Args:
            moe: the coefficients of the losses; None: 0.
        """
        self.aux_coeff, self.z_coeff = (moe.aux_loss_coeff, moe.z_loss_coeff) if moe is not None else (0.0, 0.0)
        self.num_sequences, self.num_tokens = max(num_sequences, 1), max(num_tokens, 1)
        self.aux, self.z = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        self.load = torch.zeros(len(routed.layers), routed.num_experts, dtype=torch.float64, device=device)

    def metrics(self, group: ProcessGroup) -> dict[str, float]:
        """Return means over layers of the losses without their coefficients, where these are not 0, and the load
        imbalance: the largest expert's load over the mean, by layer. Collective over the role's ranks, `group`."""
        totals = torch.cat([self.aux.view(1), self.z.view(1), self.load.flatten()])
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        totals = totals.cpu()
        aux, z = totals[:2].tolist()
        load = totals[2:].view(self.load.shape)
        imbalance = load.amax(1) / load.mean(1).clamp(min=1e-9)
        metrics = {"moe_load_imbalance/mean": float(imbalance.mean()), "moe_load_imbalance/max": float(imbalance.max())}
        if self.aux_coeff:
            metrics["moe_aux_loss"] = aux / len(load)
        if self.z_coeff:
            metrics["moe_z_loss"] = z / len(load)
        return metrics


class Router(TopKRouter):
    """Megatron's router with losses and replay that do not use process-global state.

    Scores of experts may have a bias for the choice. Megatron trains it by its own rule, over its process-global
    groups; here it is a frozen parameter, so that it is loaded, saved and sent to the rollout engine like all others,
    in their dtype.
    """

    def __init__(
        self,
        config: TransformerConfig,
        block: MixtureOfExperts,
        pg_collection: ProcessGroupCollection,
        exact: bool = False,
        **_: object,
    ) -> None:
        super().__init__(config, pg_collection)
        self._block, self._exact = block, exact
        if block.has_bias:
            self.bias = torch.nn.Parameter(torch.empty(block.num_experts, dtype=config.params_dtype))
            # Each rank has the gradient of its tokens.
            mark(self.bias, sequence_parallel=config.sequence_parallel)
        if block.has_score_bias:
            bias = torch.zeros(block.num_experts, dtype=config.params_dtype)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the parameters' dtype, so that training and rollout choose alike."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits fp32 (..., experts)."""
        if self._exact:
            return exact_linear(input.float(), self.weight.float())
        logits: Tensor = super().gating(input)
        return logits

    def forward(self, input: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Map this rank's tokens (n, 1, hidden) to weights fp32 and ids int64 of their experts, (n, topk) each."""
        logits = self.gating(input).flatten(0, 1)
        layer = routing.layers.index(self.layer_number - 1)
        replayed = None if routing.replayed is None else self._local_rows(routing.replayed[:, layer], len(logits))
        weights, ids = route(logits, self._block, self.expert_bias, replayed)
        if routing.recorded is not None:
            routing.recorded[layer] = ids.to(torch.int16)
        # With recomputation the first pass has no gradient, so each token is counted once.
        if routing.losses is not None and torch.is_grad_enabled():
            weights = _AddLoss.apply(weights, self._losses(logits, ids, layer, routing, routing.losses))
        return weights, ids

    def _losses(self, logits: Tensor, ids: Tensor, layer: int, routing: Routing, losses: RouterLosses) -> Tensor:
        """Return this rank's part of the layer's weighted losses, a scalar in fp32.

        Aux loss of a sequence of T tokens, K of E experts each: sum over experts of f_i P_i with f_i = E / (K T) times
        the tokens that went to i, and P_i the mean probability of i (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6,
        taken per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), 1 under an even load; then the mean over
        sequences. A product of two means over a micro-batch would depend on the other sequences in it. z-loss: the mean
        over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
        """
        sequences, lengths = self._local_rows(routing.sequences, len(logits)), routing.lengths
        chosen = torch.zeros_like(logits).scatter_(1, ids, 1.0)
        load = logits.new_zeros(len(lengths) + 1, self.num_experts).index_add_(0, sequences, chosen)
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


class _AddLoss(torch.autograd.Function):
    """Identity of `output`; in the backward pass `loss` is added to what is minimised."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)
