"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpcrl.model.shape import ModelShape

OWN = -1  # in place of an expert's number, where no choice was recorded and the router makes its own


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
