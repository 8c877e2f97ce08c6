"""Losses that hold back the tokens whose log-prob goes along most with the advantage, lest the entropy collapse.

Both compare a token with all others of the tensor they are given, so what they choose depends on the micro-batch.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.aggregation import TokenLosses, token_mean
from hpcrl.algorithms.masked import masked_mean
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.policy_losses.registry import register_policy_loss
from hpcrl.algorithms.policy_losses.surrogate import pessimistic_clip


@register_policy_loss("clip_cov")
def clip_cov(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
    generator: torch.Generator | None = None,
) -> TokenLosses:
    """PPO's clipped loss, in which some tokens of high covariance count nothing (Cui et al., arXiv 2505.22617).

    cov = (A - mean A)(log_prob - mean log_prob), means over this tensor. Of the tokens with
    clip_cov_lb < cov < clip_cov_ub that the clip leaves alone, max(1, int(clip_cov_ratio tokens)) are drawn, in the
    order of torch.randperm, without it where there are none. Quirks of verl: the log-ratio is not clamped, there is no
    dual clip, and `actor/pg_clipfrac` is the share of the drawn tokens.
    """
    _expect_positive("clip_cov_ratio", cfg.clip_cov_ratio)
    log_ratio = log_prob - old_log_prob
    values, clipped = pessimistic_clip(log_ratio.exp(), advantages, cfg)
    score = log_prob.detach()
    covariance = (advantages - masked_mean(advantages, response_mask)) * (score - masked_mean(score, response_mask))
    eligible = (covariance > cfg.clip_cov_lb) & (covariance < cfg.clip_cov_ub) & (response_mask > 0) & ~clipped
    candidates = eligible.flatten().nonzero().squeeze(-1)
    drawn = torch.zeros_like(eligible)
    if len(candidates):
        count = max(int(cfg.clip_cov_ratio * response_mask.sum().item()), 1)
        order = torch.randperm(len(candidates), generator=generator)[:count]
        drawn.view(-1)[candidates[order.to(candidates.device)]] = True
    return TokenLosses(
        values * ~drawn,
        {
            "actor/pg_clipfrac": token_mean(drawn, response_mask),
            "actor/ppo_kl": token_mean(-log_ratio, response_mask),
        },
    )


@register_policy_loss("kl_cov")
def kl_cov(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A r, plus ppo_kl_coef |log r| at the tokens of the highest covariance (Cui et al., arXiv 2505.22617).

    Those are the max(1, int(kl_cov_ratio tokens)) with the largest (A - mean A)(log_prob - mean log_prob), means over
    this tensor. Quirks of verl: the ratio is neither clamped nor clipped, and `actor/ppo_kl` is the mean of |log r|.
    """
    _expect_positive("kl_cov_ratio", cfg.kl_cov_ratio)
    log_ratio = log_prob - old_log_prob
    valid = (response_mask > 0).flatten().nonzero().squeeze(-1)
    penalised = torch.zeros_like(log_ratio)
    if len(valid):
        advantage, score = advantages.flatten()[valid], log_prob.detach().flatten()[valid]
        covariance = (advantage - advantage.mean()) * (score - score.mean())
        count = min(max(int(cfg.kl_cov_ratio * len(valid)), 1), len(valid))
        penalised.view(-1)[valid[covariance.topk(count).indices]] = 1.0
    values = -advantages * log_ratio.exp() + cfg.ppo_kl_coef * log_ratio.abs() * penalised
    return TokenLosses(values, {"actor/ppo_kl": token_mean(log_ratio.abs(), response_mask)})


def _expect_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"policy_loss.{name} is {value}; expected more than 0; verl's default is 0.0002")
