"""Metrics of a step's data, of one replica's samples and mergeable over replicas; keys are verl's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcrl.algorithms.aggregation import masked_mean, masked_sum
from hpcrl.algorithms.metrics import ExplainedVariance, Max, Mean, Metric, Min, NoiseProxy, Pearson, Std


def sample_statistics(
    *,
    prompt_length: Tensor,
    response_length: Tensor,
    max_prompt_length: int,
    max_response_length: int,
    score: Tensor,
) -> dict[str, Metric]:
    """Scores and lengths; all (B,), lengths in tokens.

    Empty ("aborted") responses have no score, and the non-aborted lengths leave them out. clip_ratio is the share of
    samples of maximal length.
    """
    answered = response_length > 0
    every = torch.ones_like(answered)
    return {
        "response/aborted_ratio": Mean.of(~answered, every),
        **_mean_max_min("critic/score", score, answered),
        **_length("response_length", response_length, max_response_length, every),
        **_length("response_length_non_aborted", response_length, max_response_length, answered),
        **_length("prompt_length", prompt_length, max_prompt_length, every),
    }


def response_statistics(
    *,
    prompt_length: Tensor,
    response_length: Tensor,
    max_prompt_length: int,
    max_response_length: int,
    token_level_scores: Tensor,
    token_level_rewards: Tensor,
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
) -> dict[str, Metric]:
    """`sample_statistics`, and rewards, advantages, returns and values.

    Lengths: int (B,), in tokens; the others (B, T). A sample's score is the sum over its tokens, its reward that
    after the KL penalty; empty responses have neither. Quirk of verl: where rejection sampling edits the mask,
    advantages, returns and values are of the tokens that are left, and lengths are not: pass that mask.
    """
    statistics = {
        **sample_statistics(
            prompt_length=prompt_length,
            response_length=response_length,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            score=token_level_scores.sum(-1),
        ),
        **_mean_max_min("critic/rewards", token_level_rewards.sum(-1), response_length > 0),
        **_mean_max_min("critic/advantages", advantages, response_mask),
        **_mean_max_min("critic/returns", returns, response_mask),
    }
    if values is not None:
        statistics |= _mean_max_min("critic/values", values, response_mask)
        statistics["critic/vf_explained_var"] = ExplainedVariance.of(values, returns, response_mask)
    return statistics


def rollout_log_prob_statistics(
    rollout_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> dict[str, Metric]:
    """How far the rollout engine's log-probs are from the training engine's on the same tokens; all (B, T).

    probs_diff is |exp(rollout) - exp(training)|, log_probs_diff |rollout - training| in nats. Quirk of verl:
    probs_diff_valid is 1 where any token counts, whatever its numbers.
    """
    rollout_probs, actor_probs = rollout_log_probs.exp(), old_log_probs.exp()
    probs_diff = (rollout_probs - actor_probs).abs()
    log_probs_diff = (rollout_log_probs - old_log_probs).abs()
    return {
        "training/rollout_probs_diff_valid": Max((response_mask != 0).any().double()),
        "training/rollout_probs_diff_max": Max.of(probs_diff, response_mask),
        "training/rollout_probs_diff_mean": Mean.of(probs_diff, response_mask),
        "training/rollout_probs_diff_std": Std.of(probs_diff, response_mask),
        "training/rollout_actor_probs_pearson_corr": Pearson.of(actor_probs, rollout_probs, response_mask),
        "training/rollout_log_probs_diff_max": Max.of(log_probs_diff, response_mask),
        "training/rollout_log_probs_diff_mean": Mean.of(log_probs_diff, response_mask),
    }


def variance_proxy_statistics(
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
    grad_norm: float | None = None,
) -> dict[str, Metric]:
    """Proxies of the variance of the gradient, E|g|^2 of a trajectory estimated by E[A^2 W]; tensors (B, T).

    W = sum_t (1 - 2 pi_t + sum_pi_squared_t), pi_t = exp(old_log_probs): squared norms of d log pi_t / d logits;
    A = mean_t advantages. total power = E[A^2 max(W, 0)]; signal = grad_norm^2, of the step (verl: the mean
    of its mini-batches, before clipping); pure noise = max(0, (power - signal) / (samples - 1)).

    Quirks of verl: with importance weights w, power = E[mean(w)^2 A^2 max(W', 0)], where W' leaves out tokens of
    weight 0, while expected_w is of W weighted by w^2; without a gradient norm, or with one sample, signal and noise
    are 0; sequences without tokens count.
    """
    score = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    advantage = masked_mean(advantages, response_mask, dim=-1)
    power = advantage.square()
    weighted = score
    if rollout_is_weights is not None:
        squared = rollout_is_weights.square()
        weighted = score * squared
        score = weighted / squared.clamp(min=1e-10)
        power = power * masked_mean(rollout_is_weights, response_mask, dim=-1).square()
    every = torch.ones_like(advantage)
    total_power = Mean.of(power * masked_sum(score, response_mask, dim=-1).clamp(min=0.0), every)
    return {
        "variance_proxy/proxy1_signal_strength": Max(0.0 if grad_norm is None else grad_norm**2),
        "variance_proxy/proxy2_total_power": total_power,
        "variance_proxy/proxy3_pure_noise": NoiseProxy(total_power, math.inf if grad_norm is None else grad_norm**2),
        "variance_proxy/expected_a_squared": Mean.of(advantage.square(), every),
        "variance_proxy/expected_w": Mean.of(masked_sum(weighted, response_mask, dim=-1), every),
    }


def _mean_max_min(prefix: str, x: Tensor, mask: Tensor) -> dict[str, Metric]:
    return {f"{prefix}/mean": Mean.of(x, mask), f"{prefix}/max": Max.of(x, mask), f"{prefix}/min": Min.of(x, mask)}


def _length(prefix: str, length: Tensor, longest: int, counted: Tensor) -> dict[str, Metric]:
    return {**_mean_max_min(prefix, length, counted), f"{prefix}/clip_ratio": Mean.of(length == longest, counted)}
