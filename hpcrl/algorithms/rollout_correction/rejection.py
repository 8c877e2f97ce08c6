"""Rejection of tokens and sequences on which the trained policy is too far from the rollout's."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from hpcrl.algorithms.masked import masked_mean, masked_sum
from hpcrl.algorithms.metrics import Max, Mean, Metric, Min, Spread
from hpcrl.algorithms.rollout_correction.metrics import SAFETY_BOUND
from hpcrl.algorithms.rollout_correction.settings import Criterion


def reject(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, criteria: tuple[Criterion, ...]
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The mask without what fails one of the criteria, and `rollout_corr/rollout_rs_*`.

    log_ratio: training - rollout, (B, T), in nats, 0 where response_mask (B, T) is; clamped to +-20. Per token
    k1 = -log_ratio, k2 = log_ratio^2 / 2, k3 = exp(log_ratio) - 1 - log_ratio (Schulman,
    joschu.net/blog/kl-approx.html); a sequence's statistic is the sum, mean or maximum over its tokens, and it
    stays or goes whole. Quirk of verl: rollout_rs_seq_masked_fraction counts empty sequences in its denominator, those
    of the single options do not.
    """
    metrics: dict[str, Metric] = {}
    keep = torch.ones_like(response_mask, dtype=torch.bool)
    for criterion in criteria:
        statistic = _statistic(log_ratio, response_mask, criterion)
        kept = statistic <= criterion.upper
        if criterion.lower is not None:
            kept &= statistic >= criterion.lower
        keep &= kept if kept.dim() == 2 else kept.unsqueeze(-1)
        metrics |= _rejection_metrics(statistic, kept, response_mask, criterion)
    every = torch.ones(len(keep), device=keep.device)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = Mean.of(~keep, response_mask)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = Mean.of((~keep & (response_mask != 0)).any(-1), every)
    return response_mask * keep, metrics


def _statistic(log_ratio: torch.Tensor, response_mask: torch.Tensor, criterion: Criterion) -> torch.Tensor:
    """(B, T) at the token level, else (B,); 0 for an empty sequence."""
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if criterion.estimator == "k1":
        token = -bounded
    elif criterion.estimator == "k2":
        token = 0.5 * bounded.square()
    else:
        token = bounded.exp() - 1 - bounded
    if criterion.level == "token":
        return token
    if criterion.level == "seq_sum":
        return masked_sum(token, response_mask, dim=-1)
    if criterion.level == "seq_mean":
        return masked_mean(token, response_mask, dim=-1)
    # k2 and k3 are not negative: the column of zeros serves sequences, and batches, without tokens
    return functional.pad(token.masked_fill(response_mask == 0, 0.0), (0, 1)).amax(-1)


def _rejection_metrics(
    statistic: torch.Tensor, kept: torch.Tensor, response_mask: torch.Tensor, criterion: Criterion
) -> dict[str, Metric]:
    """verl's metrics of one option, over the tokens and the sequences that have tokens.

    Quirks of verl: mean and std weigh a sequence's statistic by its tokens, std clamps it to the bounds first (k2, k3:
    lower 0) and divides by n, seq_std by n - 1; at the token level seq_* are of each sequence's mean; fraction_low is
    0 for k2 and k3, and seq_fraction_low is missing.
    """
    key = f"rollout_corr/rollout_rs_{criterion.option}_"
    of_token = statistic.dim() == 2
    token = statistic if of_token else statistic.unsqueeze(-1).expand(response_mask.shape)
    token_kept = kept if of_token else kept.unsqueeze(-1).expand(response_mask.shape)
    sequence = masked_mean(statistic, response_mask, dim=-1) if of_token else statistic
    answered = (response_mask != 0).any(-1)
    level, valid = (token, response_mask) if of_token else (sequence, answered)
    lower = 0.0 if criterion.lower is None else criterion.lower
    low = -math.inf if criterion.lower is None else criterion.lower
    metrics: dict[str, Metric] = {
        key + "mean": Mean.of(token, response_mask),
        key + "max": Max.of(level, valid),
        key + "min": Min.of(level, valid),
        key + "fraction_high": Mean.of(level > criterion.upper, valid),
        key + "fraction_low": Mean.of(level < low, valid),
        key + "std": Spread.of(token.clamp(lower, criterion.upper), response_mask, ddof=0),
        key + "seq_mean": Mean.of(sequence, answered),
        key + "seq_std": Spread.of(sequence, answered, ddof=1),
        key + "seq_max": Max.of(sequence, answered),
        key + "seq_min": Min.of(sequence, answered),
        key + "seq_max_deviation": Max.of(sequence.abs(), answered),
        key + "seq_fraction_high": Mean.of(sequence > criterion.upper, answered),
        key + "masked_fraction": Mean.of(~token_kept, response_mask),
        key + "seq_masked_fraction": Mean.of((~token_kept & (response_mask != 0)).any(-1), answered),
    }
    if criterion.lower is not None:
        metrics[key + "seq_fraction_low"] = Mean.of(sequence < low, answered)
    return metrics
