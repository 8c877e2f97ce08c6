"""How far the trained policy is from the one that wrote the tokens: metrics, importance weights, rejection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpcrl.algorithms.aggregation import Reduce, masked_mean, masked_sum
from hpcrl.algorithms.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, Spread
from hpcrl.algorithms.parameters import torch

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.algorithms.rollout_correction import Bounds, Criterion

SAFETY_BOUND = 20.0  # of a log-ratio before exp: e^20 is 4.9e8


def off_policy_metrics(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """Perplexities, KL and chi-squared of the trained policy p against the rollout's q; all (B, T), in nats.

    With d = log p - log q on the sampled tokens and L the mean log-prob of a sequence:
    kl = E[-d], KL(q | p); k3_kl = E[e^d - d - 1]; chi2_token = E[e^2d] - 1, over tokens;
    ppl = E[e^-L]; log_ppl = E[-L]; log_ppl_diff = L_q - L_p; ppl_ratio = E[e^log_ppl_diff];
    chi2_seq = E[e^(2 sum d)] - 1, over sequences. chi2 clamps d (and sum d) to +-20, k3_kl does not.

    Quirk of verl: sequences without tokens count in the sequence means, with L = 0 (perplexity 1).
    """
    log_ratio = (log_probs - rollout_log_probs).masked_fill(response_mask == 0, 0.0)
    mean_training = masked_mean(log_probs, response_mask, dim=-1)
    mean_rollout = masked_mean(rollout_log_probs, response_mask, dim=-1)
    difference = mean_rollout - mean_training
    every = torch.ones_like(difference)
    sequence_log_ratio = masked_sum(log_ratio, response_mask, dim=-1)
    return {
        "rollout_corr/training_ppl": Mean.of((-mean_training).exp(), every),
        "rollout_corr/training_log_ppl": Mean.of(-mean_training, every),
        "rollout_corr/kl": Mean.of(-log_ratio, response_mask),
        "rollout_corr/k3_kl": Mean.of(log_ratio.exp() - log_ratio - 1, response_mask),
        "rollout_corr/rollout_ppl": Mean.of((-mean_rollout).exp(), every),
        "rollout_corr/rollout_log_ppl": Mean.of(-mean_rollout, every),
        "rollout_corr/log_ppl_diff": Mean.of(difference, every),
        "rollout_corr/log_ppl_abs_diff": Mean.of(difference.abs(), every),
        "rollout_corr/log_ppl_diff_max": Max.of(difference, every),
        "rollout_corr/log_ppl_diff_min": Min.of(difference, every),
        "rollout_corr/ppl_ratio": Mean.of(difference.exp(), every),
        "rollout_corr/chi2_token": Mean.of(bounded_exp(log_ratio).square() - 1, response_mask),
        "rollout_corr/chi2_seq": Mean.of(bounded_exp(sequence_log_ratio).square() - 1, every),
    }


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)), shape and dtype of the input."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def importance_weights(
    log_ratio: Tensor, response_mask: Tensor, level: str, bounds: Bounds, batch_normalize: bool, reduce: Reduce
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights (B, T) and `rollout_corr/rollout_is_*`.

    token: exp(log_ratio); sequence: exp(sum over its tokens), the same on each of them; exponents clamped to +-20;
    then truncated or cut by `bounds` (TIS: fengyao.notion.site/off-policy-rl; IcePop: arXiv 2510.18855).
    batch_normalize divides by the mean weight of all tokens (token) or of all sequences with tokens (sequence) of all
    replicas, unless that is below 1e-8. Quirk of verl: in bypass mode it normalises over the ranks' present
    micro-batches, so that its weights depend on the micro-batching; metrics are of the weights before normalising.

    Args:
        log_ratio, response_mask: (B, T), log_ratio 0 where the mask is.
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


def _mean_weight(weights: Tensor, response_mask: Tensor, level: str, reduce: Reduce) -> Tensor:
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
    weights: Tensor, raw: Tensor, sequence_log_ratio: Tensor | None, response_mask: Tensor, bounds: Bounds
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
        largest, smallest, valid = weights, weights, response_mask
        high, low = raw > bounds.upper, raw < lower
    else:
        largest, smallest, valid = sequence_log_ratio.clamp(max=SAFETY_BOUND).exp(), sequence_log_ratio.exp(), every
        high, low = sequence_log_ratio > math.log(bounds.upper), sequence_log_ratio < math.log(lower)
    return {
        key + "max": Max.of(largest, valid),
        key + "min": Min.of(smallest, valid),
        key + "ratio_fraction_high": Mean.of(high, valid),
        key + "ratio_fraction_low": Mean.of(low, valid),
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


def reject(
    log_ratio: Tensor, response_mask: Tensor, criteria: tuple[Criterion, ...]
) -> tuple[Tensor, dict[str, Metric]]:
    """The mask without what is rejected by one of the criteria, and `rollout_corr/rollout_rs_*`.

    Per token k1 = -log_ratio, k2 = log_ratio^2 / 2, k3 = exp(log_ratio) - 1 - log_ratio (Schulman,
    joschu.net/blog/kl-approx.html); a sequence's statistic is the sum, mean or maximum over its tokens, and it stays or
    goes whole. Quirk of verl: rollout_rs_seq_masked_fraction counts empty sequences in its denominator, those of the
    single options do not.

    Args:
        log_ratio: training - rollout, (B, T), in nats, 0 where response_mask (B, T) is; clamped to +-20.
    """
    metrics: dict[str, Metric] = {}
    keep = torch.ones_like(response_mask, dtype=torch.bool)
    for criterion in criteria:
        statistic = _statistic(log_ratio, response_mask, criterion)
        accepted = statistic <= criterion.upper
        if criterion.lower is not None:
            accepted &= statistic >= criterion.lower
        keep &= accepted if accepted.dim() == 2 else accepted.unsqueeze(-1)
        metrics |= _rejection_metrics(statistic, accepted, response_mask, criterion)
    every = torch.ones(len(keep), device=keep.device)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = Mean.of(~keep, response_mask)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = Mean.of((~keep & (response_mask != 0)).any(-1), every)
    return response_mask * keep, metrics


def _statistic(log_ratio: Tensor, response_mask: Tensor, criterion: Criterion) -> Tensor:
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
    return torch.nn.functional.pad(token.masked_fill(response_mask == 0, 0.0), (0, 1)).amax(-1)


def _rejection_metrics(
    statistic: Tensor, accepted: Tensor, response_mask: Tensor, criterion: Criterion
) -> dict[str, Metric]:
    """verl's metrics of one option, over the tokens and the sequences that have tokens.

    Quirks of verl: mean and std weigh a sequence's statistic by its tokens, std clamps it to the bounds first (k2, k3:
    lower 0) and divides by n, seq_std by n - 1; at the token level seq_* are of each sequence's mean; fraction_low is
    0 for k2 and k3, and seq_fraction_low is missing.
    """
    key = f"rollout_corr/rollout_rs_{criterion.option}_"
    of_token = statistic.dim() == 2
    token = statistic if of_token else statistic.unsqueeze(-1).expand(response_mask.shape)
    token_accepted = accepted if of_token else accepted.unsqueeze(-1).expand(response_mask.shape)
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
        key + "masked_fraction": Mean.of(~token_accepted, response_mask),
        key + "seq_masked_fraction": Mean.of((~token_accepted & (response_mask != 0)).any(-1), answered),
    }
    if criterion.lower is not None:
        metrics[key + "seq_fraction_low"] = Mean.of(sequence < low, answered)
    return metrics
