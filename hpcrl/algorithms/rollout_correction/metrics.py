"""How far the trained policy is from the one that wrote the tokens."""

from __future__ import annotations

import torch

from hpcrl.algorithms.masked import masked_mean, masked_sum
from hpcrl.algorithms.metrics import Max, Mean, Metric, Min

SAFETY_BOUND = 20.0  # of a log-ratio before exp: e^20 is 4.9e8


def off_policy_metrics(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, Metric]:
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


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(clamp(log_ratio, -20, 20)), shape and dtype of the input."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
