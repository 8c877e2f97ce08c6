"""The policy losses: each is a ratio, per token or sequence, and a rule that bounds it.

Padding, the weights that correct rollout mismatch (`policy_losses.PolicyLoss`) and the mean over tokens or sequences
(`aggregation.aggregate`) are the same for all, so a new loss is its parameters and one decorated function of a few
lines. All tensors are (B, T); log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.algorithms.aggregation import TokenLosses, masked_mean, masked_sum, token_mean
from hpcrl.algorithms.metrics import Metric
from hpcrl.algorithms.parameters import param, torch
from hpcrl.algorithms.policy_losses import Clip, DualClip, register_policy_loss
from hpcrl.algorithms.rollout_correction import RolloutCorrection, correct_rollout

if TYPE_CHECKING:
    from torch import Tensor


def token_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, clamped to [-20, 20] as in verl."""
    return (log_prob - old_log_prob).clamp(-20.0, 20.0)


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Mean of log(pi / pi_old) over the sequence, at each of its tokens (GSPO, arXiv 2507.18071, as GSPO-token).

    The value is the sequence's, the gradient that of the token's log_prob: sg[s] + log_prob - sg[log_prob]. Clamped
    from above at 10 as in verl.
    """
    lengths = response_mask.sum(dim=-1).clamp(min=1)
    of_sequence = masked_sum(log_prob - old_log_prob, response_mask, dim=-1) / lengths
    return (log_prob - log_prob.detach() + of_sequence.detach().unsqueeze(-1)).clamp(max=10.0)


def clip_ratio(ratio: Tensor, params: Clip) -> Tensor:
    """The ratio within [1 - clip_ratio_low, 1 + clip_ratio_high]; no gradient outside."""
    return ratio.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)


def pessimistic_clip(ratio: Tensor, advantages: Tensor, params: Clip) -> tuple[Tensor, Tensor]:
    """PPO's max(-A r, -A clip(r)) (Schulman et al. 2017, arXiv 1707.06347, eq. 7), and where the clip raised it."""
    unclipped = -advantages * ratio
    clipped = -advantages * clip_ratio(ratio, params)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def score_surrogate(log_prob: Tensor, advantages: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """-A sg(weight) log_prob: its gradient is the policy gradient, weighted."""
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
    return -advantages * weight * log_prob


def ppo_metrics(
    log_ratio: Tensor, response_mask: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
) -> dict[str, Metric]:
    """The three metrics that verl logs for most losses; what a loss does not count is 0.

    Args:
        log_ratio: log(pi / pi_old), of which the mean is `-actor/ppo_kl`.
        clipped, clipped_lower: bool.
    """
    nowhere = torch.zeros_like(response_mask, dtype=torch.bool)
    return {
        "actor/pg_clipfrac": token_mean(nowhere if clipped is None else clipped, response_mask),
        "actor/ppo_kl": token_mean(-log_ratio, response_mask),
        "actor/pg_clipfrac_lower": token_mean(nowhere if clipped_lower is None else clipped_lower, response_mask),
    }


@register_policy_loss("vanilla")
def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: DualClip
) -> TokenLosses:
    """PPO's clipped loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with dual clip (Ye et al., arXiv 1912.09729).

    L1 = max(-A r, -A clip(r, 1 - low, 1 + high));  loss = min(L1, -A c) if A < 0 else L1, c = clip_ratio_c or 3
    """
    limit = params.clip_ratio_c
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    values, clipped = pessimistic_clip(log_ratio.exp(), advantages, params)
    bound = -advantages * limit
    negative = advantages < 0
    return TokenLosses(
        torch.where(negative, torch.minimum(values, bound), values),
        ppo_metrics(log_ratio, response_mask, clipped, (values > bound) & negative),
    )


@register_policy_loss("gspo", params=Clip)
def gspo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Clip
) -> TokenLosses:
    """max(-A s, -A clip(s)) with the sequence's ratio s at each of its tokens (GSPO, arXiv 2507.18071).

    The paper takes the mean per sequence, which is loss_agg_mode=seq-mean-token-mean, the default of verl's function
    (its trainer passes the actor's); `policy_loss` has token-mean for all losses. As in verl no dual clip, and
    `actor/ppo_kl` is of the unclamped token ratios.
    """
    ratio = sequence_log_ratio(log_prob, old_log_prob, response_mask).exp()
    values, clipped = pessimistic_clip(ratio, advantages, params)
    return TokenLosses(values, ppo_metrics(log_prob - old_log_prob, response_mask, clipped))


@dataclass(frozen=True)
class Sapo:
    tau_pos: float = param(1.0, gt=0, help="sapo: temperature of the gate for positive advantages")
    tau_neg: float = param(1.05, gt=0, help="sapo: temperature of the gate for negative advantages")


@register_policy_loss("sapo", params=Sapo)
def sapo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Sapo
) -> TokenLosses:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347).

    Quirk of verl: always aggregated as seq-mean-token-mean; both clip fractions are 0.
    """
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    tau = torch.full_like(advantages, params.tau_neg).masked_fill(advantages > 0, params.tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    metrics = ppo_metrics(log_ratio, response_mask)
    return TokenLosses(-gate * advantages, metrics, loss_agg_mode="seq-mean-token-mean")


@register_policy_loss("gpg")
def gpg(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: DualClip
) -> TokenLosses:
    """-A log_prob (GPG, arXiv 2504.02546). As in verl without metrics."""
    return TokenLosses(score_surrogate(log_prob, advantages), {})


@register_policy_loss("cispo", params=Clip)
def cispo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Clip
) -> TokenLosses:
    """-A sg(clip(r, 1 - low, 1 + high)) log_prob: clipped tokens keep a gradient (CISPO, arXiv 2506.13585)."""
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    weight = clip_ratio(ratio, params)
    return TokenLosses(
        score_surrogate(log_prob, advantages, weight), ppo_metrics(log_ratio, response_mask, ratio != weight)
    )


@dataclass(frozen=True)
class Dppo(DualClip):
    clip_ratio_c: float = param(20.0, gt=1, help="bound of the ratio")


@register_policy_loss("dppo_tv", params=Dppo)
def dppo_tv(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Dppo
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob, 0 where the token's probability has moved too far (DPPO, arXiv 2602.04879).

    Too far, in total variation: p - p_old > clip_ratio_high where A > 0, p_old - p > clip_ratio_low elsewhere.
    c is clip_ratio_c: the paper's 20 by default, while templates, verl's and ours, have 3 unless they set it.
    """
    moved = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, moved <= params.clip_ratio_high, moved >= -params.clip_ratio_low)
    return _within(inside, log_prob, old_log_prob, advantages, response_mask, params)


@register_policy_loss("dppo_kl", params=Dppo)
def dppo_kl(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Dppo
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob, 0 where the token's probability has moved too far (DPPO, arXiv 2602.04879).

    Too far, in the KL of this token against all others, KL(p_old | p) = p_old log(p_old / p)
    + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8)): above clip_ratio_high with p > p_old where A > 0, above
    clip_ratio_low with p < p_old elsewhere. c as in `dppo_tv`.
    """
    p, old = log_prob.detach().exp(), old_log_prob.exp()
    others = torch.log((1 - old + 1e-8) / (1 - p + 1e-8))
    kl = old * (old_log_prob - log_prob.detach()) + (1 - old) * others
    rising = (kl <= params.clip_ratio_high) | (p <= old)
    falling = (kl <= params.clip_ratio_low) | (p >= old)
    inside = torch.where(advantages > 0, rising, falling)
    return _within(inside, log_prob, old_log_prob, advantages, response_mask, params)


def _within(
    inside: Tensor, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: DualClip
) -> TokenLosses:
    """-A sg(min(r, c)) log_prob at the tokens `inside` (bool) their trust region, 0 at the others."""
    limit = params.clip_ratio_c
    log_ratio = token_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    values = score_surrogate(log_prob, advantages, ratio.clamp(max=limit)) * inside
    truncated = (ratio > limit) & inside
    return TokenLosses(values, ppo_metrics(log_ratio, response_mask, ~inside, truncated))


@dataclass(frozen=True)
class Dro:
    dro_beta: float | None = param(None, gt=0, help="dro: weight of the squared log-ratio; dro needs it")

    def __post_init__(self) -> None:
        if self.dro_beta is None:
            raise ValueError("policy_loss.dro_beta is null; loss_mode=dro needs a number above 0")


@register_policy_loss("dro", params=Dro)
def dro(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: Dro) -> TokenLosses:
    """-(A log_prob - dro_beta / 2 log(r)^2), the ratio not clamped (after DRO, arXiv 2405.19107)."""
    assert params.dro_beta is not None
    log_ratio = log_prob - old_log_prob
    values = score_surrogate(log_prob, advantages) + 0.5 * params.dro_beta * log_ratio.square()
    return TokenLosses(values, {"actor/ppo_kl": token_mean(-log_ratio, response_mask)})


@register_policy_loss("geo_mean", params=Clip)
def geo_mean(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: Clip,
    rollout_is_weights: Tensor | None = None,
) -> TokenLosses:
    """-A s per sequence (B,), s the geometric mean of its clipped token ratios (GMPO, arXiv 2507.20673).

    log r is clipped to [-low, high] where that lowers A log r; A is the mean of the sequence's advantages, weights go
    in by their geometric mean. Quirks of verl: loss_agg_mode has no say, every sequence counts once, empty ones too;
    nothing is clamped to +-20; `actor/pg_clipfrac` counts tokens outside the range with A > 0, `_lower` those with
    A < 0. verl divides by the sequences of the micro-batch; here `aggregate` does, by those of the global mini-batch.
    """
    log_ratio = log_prob - old_log_prob
    clipped_ratio = log_ratio.clamp(-params.clip_ratio_low, params.clip_ratio_high)
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped_ratio)
    values = -masked_mean(advantages, response_mask, dim=-1) * masked_mean(bounded, response_mask, dim=-1).exp()
    if rollout_is_weights is not None:
        values = values * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, dim=-1).exp()
    clipped = log_ratio != clipped_ratio
    return TokenLosses(
        values, ppo_metrics(log_ratio, response_mask, clipped & (advantages > 0), clipped & (advantages < 0))
    )


@dataclass(frozen=True)
class BypassMode(DualClip, RolloutCorrection):
    """The clip range of ppo_clip, and the correction that the loss computes itself."""

    def __post_init__(self) -> None:
        Clip.__post_init__(self)
        RolloutCorrection.__post_init__(self)


@register_policy_loss("bypass_mode", params=BypassMode)
def bypass_mode(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: BypassMode,
    rollout_is_weights: Tensor | None = None,
) -> TokenLosses:
    """The loss where old_log_prob are the rollout's: weights and rejection come from the current policy, here.

    loss_type: ppo_clip is `vanilla`, whose ratio is the importance weight already; reinforce is -A sg(w) log_prob,
    `actor/ppo_kl` of the unclamped ratios. Both on the tokens that pass the rejection; divisors
    given by the caller stay those of all tokens. `rollout_is_weights` from outside are ignored, as in verl; batch
    normalisation of weights and the `rollout_corr/*` metrics are of this tensor.
    """
    weights, mask, metrics = correct_rollout(log_prob.detach(), old_log_prob, response_mask, params)
    if params.loss_type == "ppo_clip":
        losses = vanilla(log_prob, old_log_prob, advantages, mask, params)
    else:
        values = score_surrogate(log_prob, advantages, 1.0 if weights is None else weights)
        losses = TokenLosses(values, {"actor/ppo_kl": token_mean(old_log_prob - log_prob, mask)})
    return TokenLosses(losses.values, losses.metrics | metrics, response_mask=mask)


@dataclass(frozen=True)
class ClipCov:
    clip_cov_ratio: float = param(2e-4, gt=0, le=1, help="clip_cov: share of tokens that lose their gradient")
    clip_cov_lb: float = param(1.0, help="clip_cov: lowest covariance of a token that may lose its gradient")
    clip_cov_ub: float = param(5.0, help="clip_cov: highest covariance of a token that may lose its gradient")


@dataclass(frozen=True)
class ClipCovLoss(ClipCov, Clip):
    """The range that bounds the covariance, and the range of the ratio."""


@register_policy_loss("clip_cov", params=ClipCovLoss)
def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: ClipCovLoss,
    generator: torch.Generator | None = None,
) -> TokenLosses:
    """PPO's clipped loss, in which some tokens of high covariance have no gradient (Cui et al., arXiv 2505.22617).

    cov = (A - mean A)(log_prob - mean log_prob), means over this tensor. Of the tokens with
    clip_cov_lb < cov < clip_cov_ub that are not clipped, max(1, int(clip_cov_ratio tokens)) are drawn, in the
    order of torch.randperm; if there are none, nothing is drawn. Quirks of verl: the log-ratio is not clamped, there
    is no dual clip, and `actor/pg_clipfrac` is the share of the drawn tokens.
    """
    log_ratio = log_prob - old_log_prob
    values, clipped = pessimistic_clip(log_ratio.exp(), advantages, params)
    score = log_prob.detach()
    covariance = (advantages - masked_mean(advantages, response_mask)) * (score - masked_mean(score, response_mask))
    eligible = (covariance > params.clip_cov_lb) & (covariance < params.clip_cov_ub) & (response_mask > 0) & ~clipped
    candidates = eligible.flatten().nonzero().squeeze(-1)
    drawn = torch.zeros_like(eligible)
    if len(candidates):
        count = max(int(params.clip_cov_ratio * response_mask.sum().item()), 1)
        order = torch.randperm(len(candidates), generator=generator)[:count]
        drawn.view(-1)[candidates[order.to(candidates.device)]] = True
    return TokenLosses(
        values * ~drawn,
        {"actor/pg_clipfrac": token_mean(drawn, response_mask), "actor/ppo_kl": token_mean(-log_ratio, response_mask)},
    )


@dataclass(frozen=True)
class KlCov:
    kl_cov_ratio: float = param(2e-4, gt=0, le=1, help="kl_cov: share of tokens that get a KL penalty")
    ppo_kl_coef: float | None = param(0.1, ge=0, help="kl_cov: weight of the KL penalty; null: 1")


@register_policy_loss("kl_cov", params=KlCov)
def kl_cov(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, params: KlCov
) -> TokenLosses:
    """-A r, plus ppo_kl_coef |log r| at the tokens of the highest covariance (Cui et al., arXiv 2505.22617).

    Those are the max(1, int(kl_cov_ratio tokens)) with the largest (A - mean A)(log_prob - mean log_prob), means over
    this tensor. Quirks of verl: the ratio is neither clamped nor clipped, and `actor/ppo_kl` is the mean of |log r|.
    """
    log_ratio = log_prob - old_log_prob
    valid = (response_mask > 0).flatten().nonzero().squeeze(-1)
    penalised = torch.zeros_like(log_ratio)
    if len(valid):
        advantage, score = advantages.flatten()[valid], log_prob.detach().flatten()[valid]
        covariance = (advantage - advantage.mean()) * (score - score.mean())
        count = min(max(int(params.kl_cov_ratio * len(valid)), 1), len(valid))
        penalised.view(-1)[valid[covariance.topk(count).indices]] = 1.0
    coef = 1.0 if params.ppo_kl_coef is None else params.ppo_kl_coef
    values = -advantages * log_ratio.exp() + coef * log_ratio.abs() * penalised
    return TokenLosses(values, {"actor/ppo_kl": token_mean(log_ratio.abs(), response_mask)})


@dataclass(frozen=True)
class ActorParameters(DualClip, Sapo):
    """What the losses above read of `actor`, where verl has it."""


@dataclass(frozen=True)
class PolicyLossParameters(ClipCov, KlCov, Dro):
    """What they read of `actor.policy_loss`."""
