"""Importance weights of the trained policy against the rollout's, truncated or cut."""

from __future__ import annotations

import math

import torch

from hpcrl.algorithms.masked import Reduce, masked_mean, masked_sum
from hpcrl.algorithms.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, Spread
from hpcrl.algorithms.rollout_correction.metrics import SAFETY_BOUND, bounded_exp
from hpcrl.algorithms.rollout_correction.settings import Bounds


def importance_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    level: str,
    bounds: Bounds,
    batch_normalize: bool,
    reduce: Reduce,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Weights (B, T) and `rollout_corr/rollout_is_*`; log_ratio, response_mask: (B, T), log_ratio 0 where the mask is.

    token: exp(log_ratio); sequence: exp(sum over its tokens), the same on each of them; exponents clamped to +-20;
    then truncated or cut by `bounds` (TIS: fengyao.notion.site/off-policy-rl; IcePop: arXiv 2510.18855).
    batch_normalize divides by the mean weight of all tokens (token) or of all sequences with tokens (sequence) of all
    replicas, unless that is below 1e-8. Quirk of verl: in bypass mode it normalises over the ranks' present
    micro-batches, so that its weights depend on the micro-batching; metrics are of the weights before normalising.
    """
    if level == "sequence":
        sequence_log_ratio = masked_sum(log_ratio, response_mask, dim=-1)
        raw = bounded_exp(sequence_log_ratio).unsqueeze(-1) * response_mask
    else:
        sequence_log_ratio = None
        raw = bounded_exp(log_ratio) * response_mask
    outside = raw > bounds.upper
    if bounds.lower is None:
        weights = raw.clamp(max=bounds.upper)
    else:
        outside |= raw < bounds.lower
        weights = raw.masked_fill(outside, 0.0)
    metrics = _weight_metrics(weights, raw, sequence_log_ratio, response_mask, bounds)
    if bounds.lower is not None:
        metrics["rollout_corr/rollout_is_oob_ratio"] = Mean.of(outside, response_mask)
    if batch_normalize:
        factor = _mean_weight(weights, response_mask, level, reduce)
        weights = weights / factor.to(weights.dtype)
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = Mean(factor, 1.0)
    return weights, metrics


def _mean_weight(weights: torch.Tensor, response_mask: torch.Tensor, level: str, reduce: Reduce) -> torch.Tensor:
    """fp64 scalar over all replicas; 1 where that is 1e-8 or less.

    Quirk of verl: at the token level it divides by count + 1e-8, in the dtype of the mask, fp32 for integers.
    """
    if level == "sequence":
        counted = (response_mask != 0).any(-1)
        weights = masked_mean(weights, response_mask, dim=-1)
    else:
        counted = response_mask
    total, count = reduce(torch.stack([(weights * counted).sum(dtype=torch.float64), counted.sum().double()]))
    n = count.to(torch.promote_types(response_mask.dtype, torch.float32))
    mean = total / (n + 1e-8 if level == "token" else n.clamp(min=1))
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


def _weight_metrics(
    weights: torch.Tensor,
    raw: torch.Tensor,
    sequence_log_ratio: torch.Tensor | None,
    response_mask: torch.Tensor,
    bounds: Bounds,
) -> dict[str, Metric]:
    """verl's metrics of applied and raw weights, both (B, T) and 0 where the mask is.

    Quirks of verl: TIS has no lower bound, yet the low fractions count what is below 1 / upper. The sequence level
    takes max, min and ratio fractions from the untruncated product (max clamped at e^20, min not), over all sequences,
    empty ones (product 1) among them; the token level takes max and min from the applied weights. mean, std and ESS
    weigh tokens at both levels, std dividing by n. seq_* are of each sequence's mean weight, 0 for an empty one, which
    counts; seq_std divides by n - 1; the seq fractions are of raw means. verl fails where all weights are 0; here
    the ESS is NaN then.
    """
    key = "rollout_corr/rollout_is_"
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    sequence_mean = masked_mean(weights, response_mask, dim=-1)
    sequence_raw = masked_mean(raw, response_mask, dim=-1)
    every = torch.ones_like(sequence_mean)
    if sequence_log_ratio is None:
        extremes: dict[str, Metric] = {
            key + "max": Max.of(weights, response_mask),
            key + "min": Min.of(weights, response_mask),
            key + "ratio_fraction_high": Mean.of(raw > bounds.upper, response_mask),
            key + "ratio_fraction_low": Mean.of(raw < lower, response_mask),
        }
    else:
        extremes = {
            key + "max": Max.of(sequence_log_ratio.clamp(max=SAFETY_BOUND).exp(), every),
            key + "min": Min.of(sequence_log_ratio.exp(), every),
            key + "ratio_fraction_high": Mean.of(sequence_log_ratio > math.log(bounds.upper), every),
            key + "ratio_fraction_low": Mean.of(sequence_log_ratio < math.log(lower), every),
        }
    return {
        **extremes,
        key + "mean": Mean.of(weights, response_mask),
        key + "std": Spread.of(weights, response_mask, ddof=0),
        key + "eff_sample_size": EffectiveSampleSize.of(weights, response_mask),
        key + "seq_mean": Mean.of(sequence_mean, every),
        key + "seq_std": Spread.of(sequence_mean, every, ddof=1),
        key + "seq_max": Max.of(sequence_mean, every),
        key + "seq_min": Min.of(sequence_mean, every),
        key + "seq_max_deviation": Max.of((sequence_mean - 1).abs(), every),
        key + "seq_fraction_high": Mean.of(sequence_raw > bounds.upper, every),
        key + "seq_fraction_low": Mean.of(sequence_raw < lower, every),
    }
