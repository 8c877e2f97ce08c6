"""Metrics of a step's data, of one replica's samples and mergeable over replicas; keys are verl's."""

from __future__ import annotations

import torch

from hpcrl.algorithms.metrics import ExplainedVariance, Max, Mean, Metric, Min, Pearson, Std


def response_statistics(
    *,
    prompt_length: torch.Tensor,
    response_length: torch.Tensor,
    max_prompt_length: int,
    max_response_length: int,
    token_level_scores: torch.Tensor,
    token_level_rewards: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """Scores, rewards, advantages, returns, values and lengths.

    Lengths: int (B,), in tokens; the others (B, T). A sample's score is the sum over its tokens, its reward that
    after the KL penalty; empty responses have neither. clip_ratio is the share of samples of maximal length.
    """
    answered = response_length > 0
    statistics = {
        **_mean_max_min("critic/score", token_level_scores.sum(-1), answered),
        **_mean_max_min("critic/rewards", token_level_rewards.sum(-1), answered),
        **_mean_max_min("critic/advantages", advantages, response_mask),
        **_mean_max_min("critic/returns", returns, response_mask),
        **_length("response_length", response_length, max_response_length),
        **_length("prompt_length", prompt_length, max_prompt_length),
    }
    if values is not None:
        statistics |= _mean_max_min("critic/values", values, response_mask)
        statistics["critic/vf_explained_var"] = ExplainedVariance.of(values, returns, response_mask)
    return statistics


def rollout_log_prob_statistics(
    rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, Metric]:
    """How far the rollout engine's log-probs are from the training engine's on the same tokens; all (B, T).

    probs_diff is |exp(rollout) - exp(training)|, log_probs_diff |rollout - training| in nats.
    """
    rollout_probs, actor_probs = rollout_log_probs.exp(), old_log_probs.exp()
    probs_diff = (rollout_probs - actor_probs).abs()
    log_probs_diff = (rollout_log_probs - old_log_probs).abs()
    return {
        "training/rollout_probs_diff_max": Max.of(probs_diff, response_mask),
        "training/rollout_probs_diff_mean": Mean.of(probs_diff, response_mask),
        "training/rollout_probs_diff_std": Std.of(probs_diff, response_mask),
        "training/rollout_actor_probs_pearson_corr": Pearson.of(actor_probs, rollout_probs, response_mask),
        "training/rollout_log_probs_diff_max": Max.of(log_probs_diff, response_mask),
        "training/rollout_log_probs_diff_mean": Mean.of(log_probs_diff, response_mask),
    }


def _mean_max_min(prefix: str, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    return {
        f"{prefix}/mean": Mean.of(x, mask),
        f"{prefix}/max": Max.of(x, mask),
        f"{prefix}/min": Min.of(x, mask),
    }


def _length(prefix: str, length: torch.Tensor, longest: int) -> dict[str, Metric]:
    every = torch.ones_like(length)
    return {
        **_mean_max_min(prefix, length, every),
        f"{prefix}/clip_ratio": Mean.of(length == longest, every),
    }
