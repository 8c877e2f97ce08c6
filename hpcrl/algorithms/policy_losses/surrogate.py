"""What policy losses are made of: the ratio of the policies, per token or sequence, and the rules that bound it.

A loss is a ratio level x a rule. The correction for rollout mismatch and the aggregation come after it and know
nothing of it (`registry.PolicyLoss`, `aggregation.aggregate`). All tensors are (B, T); log-probs in nats.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.aggregation import token_mean
from hpcrl.algorithms.masked import masked_sum
from hpcrl.algorithms.metrics import Metric
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig


def token_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """log(pi / pi_old) of each token, clamped to [-20, 20] as in verl."""
    return (log_prob - old_log_prob).clamp(-20.0, 20.0)


def sequence_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Mean of log(pi / pi_old) over the sequence, at each of its tokens (GSPO, arXiv 2507.18071, as GSPO-token).

    The value is the sequence's, the gradient that of the token's log_prob: sg[s] + log_prob - sg[log_prob]. Clamped
    from above at 10 as in verl.
    """
    lengths = response_mask.sum(dim=-1).clamp(min=1)
    of_sequence = masked_sum(log_prob - old_log_prob, response_mask, dim=-1) / lengths
    return (log_prob - log_prob.detach() + of_sequence.detach().unsqueeze(-1)).clamp(max=10.0)


def clip_ratio(ratio: torch.Tensor, cfg: PolicyLossConfig) -> torch.Tensor:
    """The ratio within [1 - clip_ratio_low, 1 + clip_ratio_high]; no gradient outside."""
    return ratio.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)


def pessimistic_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, cfg: PolicyLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's max(-A r, -A clip(r)) (Schulman et al. 2017, arXiv 1707.06347, eq. 7), and where the clip raised it."""
    unclipped = -advantages * ratio
    clipped = -advantages * clip_ratio(ratio, cfg)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def score_surrogate(
    log_prob: torch.Tensor, advantages: torch.Tensor, weight: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """-A sg(weight) log_prob: its gradient is the policy gradient, weighted."""
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    return -advantages * weight * log_prob


def ppo_metrics(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    clipped: torch.Tensor | None = None,
    clipped_lower: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """The three metrics that verl logs for most losses; what a loss does not count is 0.

    log_ratio: log(pi / pi_old), of which the mean is `-actor/ppo_kl`. clipped, clipped_lower: bool.
    """
    nowhere = torch.zeros_like(response_mask, dtype=torch.bool)
    return {
        "actor/pg_clipfrac": token_mean(nowhere if clipped is None else clipped, response_mask),
        "actor/ppo_kl": token_mean(-log_ratio, response_mask),
        "actor/pg_clipfrac_lower": token_mean(nowhere if clipped_lower is None else clipped_lower, response_mask),
    }
