"""The policy losses: each is a ratio and a rule that bounds it (`surrogate`), one number per token.

Padding, the weights that correct rollout mismatch (`registry`) and the mean over tokens or sequences
(`aggregation`) are the same for all, so a new loss is one decorated function of a few lines.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.aggregation import TokenLosses, token_mean
from hpcrl.algorithms.masked import masked_mean
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.policy_losses.registry import register_policy_loss
from hpcrl.algorithms.policy_losses.surrogate import (
    clip_ratio,
    pessimistic_clip,
    ppo_metrics,
    score_surrogate,
    sequence_log_ratio,
    token_log_ratio,
)
from hpcrl.algorithms.rollout_correction.correction import correct_rollout


@register_policy_loss("vanilla")
def vanilla(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """PPO's clipped loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with dual clip (Ye et al., arXiv 1912.09729).

    L1 = max(-A r, -A clip(r, 1 - low, 1 + high));  loss = min(L1, -A c) if A < 0 else L1, c = clip_ratio_c or 3
    """
    limit = cfg.ratio_bound(3.0)
    if limit <= 1:
        raise ValueError(f"clip_ratio_c is {limit}; expected more than 1; verl's default is 3.0")
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    values, clipped = pessimistic_clip(log_ratio.exp(), advantages, cfg)
    bound = -advantages * limit
    negative = advantages < 0
    return TokenLosses(
        torch.where(negative, torch.minimum(values, bound), values),
        ppo_metrics(log_ratio, response_mask, clipped, (values > bound) & negative),
    )


@register_policy_loss("gspo")
def gspo(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """max(-A s, -A clip(s)) with the sequence's ratio s at each of its tokens (GSPO, arXiv 2507.18071).

    The paper takes the mean per sequence, which is loss_agg_mode=seq-mean-token-mean, the default of verl's function
    (its trainer passes the actor's); `policy_loss` has token-mean for all losses. As in verl no dual clip, and
    `actor/ppo_kl` is of the unclamped token ratios.
    """
    ratio = sequence_log_ratio(log_prob, old_log_prob, response_mask).exp()
    values, clipped = pessimistic_clip(ratio, advantages, cfg)
    return TokenLosses(values, ppo_metrics(log_prob - old_log_prob, response_mask, clipped))


@register_policy_loss("sapo")
def sapo(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347).

    Quirk of verl: always aggregated as seq-mean-token-mean; both clip fractions are 0.
    """
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    tau = torch.full_like(advantages, cfg.tau_neg).masked_fill(advantages > 0, cfg.tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    metrics = ppo_metrics(log_ratio, response_mask)
    return TokenLosses(-gate * advantages, metrics, loss_agg_mode="seq-mean-token-mean")


@register_policy_loss("gpg")
def gpg(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A log_prob (GPG, arXiv 2504.02546). As in verl without metrics."""
    return TokenLosses(score_surrogate(log_prob, advantages), {})


@register_policy_loss("cispo")
def cispo(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A sg(clip(r, 1 - low, 1 + high)) log_prob: clipped tokens keep a gradient (CISPO, arXiv 2506.13585)."""
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    weight = clip_ratio(ratio, cfg)
    return TokenLosses(
        score_surrogate(log_prob, advantages, weight), ppo_metrics(log_ratio, response_mask, ratio != weight)
    )


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob, 0 where the token's probability moved too far already (DPPO, arXiv 2602.04879).

    Too far, in total variation: p - p_old > clip_ratio_high where A > 0, p_old - p > clip_ratio_low elsewhere.
    c is clip_ratio_c; where it is not given 20, the paper's. Templates, verl's and ours, give 3 unless they set it.
    """
    moved = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, moved <= cfg.clip_ratio_high, moved >= -cfg.clip_ratio_low)
    return _within(inside, log_prob, old_log_prob, advantages, response_mask, cfg)


@register_policy_loss("dppo_kl")
def dppo_kl(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob, 0 where the token's probability moved too far already (DPPO, arXiv 2602.04879).

    Too far, in the KL of this token against all others, KL(p_old | p) = p_old log(p_old / p)
    + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8)): above clip_ratio_high with p > p_old where A > 0, above
    clip_ratio_low with p < p_old elsewhere. c as in `dppo_tv`.
    """
    p, old = log_prob.detach().exp(), old_log_prob.exp()
    others = torch.log((1 - old + 1e-8) / (1 - p + 1e-8))
    kl = old * (old_log_prob - log_prob.detach()) + (1 - old) * others
    rising = (kl <= cfg.clip_ratio_high) | (p <= old)
    falling = (kl <= cfg.clip_ratio_low) | (p >= old)
    inside = torch.where(advantages > 0, rising, falling)
    return _within(inside, log_prob, old_log_prob, advantages, response_mask, cfg)


def _within(
    inside: torch.Tensor,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob at the tokens `inside` (bool) their trust region, 0 at the others."""
    limit = cfg.ratio_bound(20.0)
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    values = score_surrogate(log_prob, advantages, ratio.clamp(max=limit)) * inside
    truncated = (ratio > limit) & inside
    return TokenLosses(values, ppo_metrics(log_ratio, response_mask, ~inside, truncated))


@register_policy_loss("dro")
def dro(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
) -> TokenLosses:
    """-(A log_prob - dro_beta / 2 log(r)^2), the ratio not clamped (after DRO, arXiv 2405.19107)."""
    if cfg.dro_beta is None or cfg.dro_beta <= 0:
        raise ValueError(f"policy_loss.dro_beta is {cfg.dro_beta}; dro needs a number above 0")
    log_ratio = log_prob - old_log_prob
    values = score_surrogate(log_prob, advantages) + 0.5 * cfg.dro_beta * log_ratio.square()
    return TokenLosses(values, {"actor/ppo_kl": token_mean(-log_ratio, response_mask)})


@register_policy_loss("geo_mean")
def geo_mean(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> TokenLosses:
    """-A s per sequence (B,), s the geometric mean of its clipped token ratios (GMPO, arXiv 2507.20673).

    log r is clipped to [-low, high] where that lowers A log r; A is the mean of the sequence's advantages, weights go
    in by their geometric mean. Quirks of verl: loss_agg_mode has no say, every sequence counts once, empty ones too;
    nothing is clamped to +-20; `actor/pg_clipfrac` counts tokens outside the range with A > 0, `_lower` those with
    A < 0. verl divides by the sequences of the micro-batch; here `aggregate` does, by those of the global mini-batch.
    """
    log_ratio = log_prob - old_log_prob
    clipped_ratio = log_ratio.clamp(-cfg.clip_ratio_low, cfg.clip_ratio_high)
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped_ratio)
    values = -masked_mean(advantages, response_mask, dim=-1) * masked_mean(bounded, response_mask, dim=-1).exp()
    if rollout_is_weights is not None:
        values = values * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, dim=-1).exp()
    clipped = log_ratio != clipped_ratio
    return TokenLosses(
        values, ppo_metrics(log_ratio, response_mask, clipped & (advantages > 0), clipped & (advantages < 0))
    )


@register_policy_loss("bypass_mode")
def bypass_mode(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: PolicyLossConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> TokenLosses:
    """The loss where old_log_prob are the rollout's: weights and rejection come from the current policy, here.

    cfg.rollout_correction.loss_type: ppo_clip is `vanilla`, whose ratio is the importance weight already; reinforce is
    -A sg(w) log_prob, `actor/ppo_kl` of the unclamped ratios. Both on the tokens that pass the rejection; divisors
    given by the caller stay those of all tokens. `rollout_is_weights` from outside are ignored, as in verl; batch
    normalisation of weights and the `rollout_corr/*` metrics are of this tensor.
    """
    correction = cfg.rollout_correction
    weights, mask, metrics = correct_rollout(log_prob.detach(), old_log_prob, response_mask, correction)
    if correction.loss_type == "ppo_clip":
        losses = vanilla(log_prob, old_log_prob, advantages, mask, cfg)
    else:
        values = score_surrogate(log_prob, advantages, 1.0 if weights is None else weights)
        losses = TokenLosses(values, {"actor/ppo_kl": token_mean(old_log_prob - log_prob, mask)})
    return TokenLosses(losses.values, losses.metrics | metrics, response_mask=mask)
