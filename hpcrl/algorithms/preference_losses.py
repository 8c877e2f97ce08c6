"""Losses on preferences: pairs of a better and a worse response, or responses that are each good or bad.

A loss is its parameters and one decorated function of a few lines: from `PairLogps` to one loss per pair.
Names and defaults are TRL 1.16's. Log-probs are in nats; a response's is the sum over its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.algorithms.parameters import LazyModule, Registry, param, torch

if TYPE_CHECKING:
    import torch.nn.functional as F
    from torch import Tensor
else:
    F = LazyModule("torch.nn.functional")


class PairLogps(NamedTuple):
    """Log-probs of B pairs, all (B,): the policy's, which carry gradients, and the reference's, None if the loss
    needs none. Lengths are in tokens, at least 1.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """log(pi / pi_ref) of chosen and rejected; log(pi) without a reference."""
        if self.ref_chosen is None or self.ref_rejected is None:
            return self.chosen, self.rejected
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    @property
    def mean_log_ratios(self) -> tuple[Tensor, Tensor]:
        """The same per token."""
        chosen, rejected = self.log_ratios
        return chosen / self.chosen_length, rejected / self.rejected_length

    @property
    def margin(self) -> Tensor:
        chosen, rejected = self.log_ratios
        return chosen - rejected


@dataclass(frozen=True)
class Beta:
    beta: float = param(0.1, gt=0, help="strength of the preference; the larger, the nearer the policy stays to ref")


@dataclass(frozen=True)
class Smoothed(Beta):
    label_smoothing: float = param(0.0, ge=0, lt=0.5, help="probability that a pair's labels are swapped")


@dataclass(frozen=True)
class SimPo(Smoothed):
    simpo_gamma: float = param(0.5, ge=0, help="simpo: the margin that chosen should have over rejected, in rewards")


@dataclass(frozen=True)
class Discopop(Beta):
    discopop_tau: float = param(0.05, gt=0, help="discopop: temperature of the blend of logistic and exponential loss")


@dataclass(frozen=True)
class Kto(Beta):
    desirable_weight: float = param(1.0, ge=0, help="kto: weight of good responses")
    undesirable_weight: float = param(1.0, ge=0, help="kto: weight of bad responses")


@dataclass(frozen=True)
class PairParameters(SimPo, Discopop):
    """The parameters of all built-in losses on pairs."""

    nll_weight: float | None = param(
        None,
        ge=0,
        help="weight of the NLL of chosen, per token (rpo_alpha, cpo_alpha); null: 1 for cpo and orpo, else 0",
    )


@dataclass(frozen=True)
class PreferenceParameters(PairParameters, Kto):
    """The parameters of all built-in losses."""


class PreferenceLoss(NamedTuple):
    """A registered loss.

    function: (PairLogps, params) -> losses, (B,); `kto` shows that of a loss that is not paired. reference: whether it
    compares with a reference policy. nll_weight: weight of the mean negative log-prob of the chosen responses' tokens,
    which is added to the loss, unless the user sets it. nll_of_prompt: whether that mean is over the prompts' tokens
    too. per_token: whether it compares log-probs per token.
    """

    function: Callable[..., Tensor]
    params: type
    reference: bool
    nll_weight: float
    nll_of_prompt: bool
    per_token: bool
    paired: bool


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss", "hpcrl.algorithms.preference_losses")


def register_preference_loss(
    name: str,
    *,
    params: type = Beta,
    reference: bool = True,
    nll_weight: float = 0.0,
    nll_of_prompt: bool = False,
    per_token: bool = False,
    paired: bool = True,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a loss as `preference.loss_type=<name>`; see `PreferenceLoss`."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        loss = PreferenceLoss(function, params, reference, nll_weight, nll_of_prompt, per_token, paired)
        PREFERENCE_LOSSES.add(name, loss)
        return function

    return register


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x): the expected logistic loss if labels are swapped with probability
    e (conservative DPO, Mitchell 2023)."""
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@register_preference_loss("sigmoid", params=Smoothed)
@register_preference_loss("cpo", params=Smoothed, reference=False, nll_weight=1.0)
def sigmoid(pairs: PairLogps, params: Smoothed) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7); conservative DPO with label_smoothing. CPO (Xu et al. 2024,
    arXiv 2401.08417, eq. 5) is the same with a uniform reference, and an NLL term."""
    return smoothed_logistic(params.beta * pairs.margin, params.label_smoothing)


@register_preference_loss("sigmoid_norm", per_token=True)
def sigmoid_norm(pairs: PairLogps, params: Beta) -> Tensor:
    """DPO on log-ratios per token, as in Tulu 3 (Lambert et al. 2024, arXiv 2411.15124, eq. 6)."""
    chosen, rejected = pairs.mean_log_ratios
    return -F.logsigmoid(params.beta * (chosen - rejected))


@register_preference_loss("hinge")
def hinge(pairs: PairLogps, params: Beta) -> Tensor:
    """SLiC's hinge (Zhao et al. 2023, arXiv 2305.10425) on DPO's margin."""
    return torch.relu(1 - params.beta * pairs.margin)


@register_preference_loss("ipo", per_token=True)
def ipo(pairs: PairLogps, params: Beta) -> Tensor:
    """IPO (Azar et al. 2023, arXiv 2310.12036, eq. 17), on log-ratios per token as in TRL; beta is the paper's tau."""
    chosen, rejected = pairs.mean_log_ratios
    return (chosen - rejected - 1 / (2 * params.beta)) ** 2


@register_preference_loss("robust", params=Smoothed)
def robust(pairs: PairLogps, params: Smoothed) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409, eq. 10): unbiased if labels are swapped with probability
    label_smoothing."""
    logits, swapped = params.beta * pairs.margin, params.label_smoothing
    return (-(1 - swapped) * F.logsigmoid(logits) + swapped * F.logsigmoid(-logits)) / (1 - 2 * swapped)


@register_preference_loss("exo_pair", params=Smoothed)
def exo_pair(pairs: PairLogps, params: Smoothed) -> Tensor:
    """EXO (Ji et al. 2024, arXiv 2402.00856, eq. 16): KL from the pair's softmax to (1 - e, e), e = label_smoothing.

    e must be above 0.
    """
    logits, swapped = params.beta * pairs.margin, params.label_smoothing
    if swapped == 0:
        raise ValueError("preference.loss_type=exo_pair needs preference.label_smoothing above 0, for example 0.001")
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-swapped))
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(swapped))


@register_preference_loss("nca_pair")
def nca_pair(pairs: PairLogps, params: Beta) -> Tensor:
    """NCA (Chen et al. 2024, arXiv 2402.05369), for pairs."""
    chosen, rejected = (params.beta * ratio for ratio in pairs.log_ratios)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


@register_preference_loss("bco_pair")
def bco_pair(pairs: PairLogps, params: Beta) -> Tensor:
    """BCO (Jung et al. 2024, arXiv 2404.04656) for pairs, without the shift of rewards."""
    chosen, rejected = (params.beta * ratio for ratio in pairs.log_ratios)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@register_preference_loss("sppo_hard")
def sppo_hard(pairs: PairLogps, params: Beta) -> Tensor:
    """SPPO (Wu et al. 2024, arXiv 2405.00675, eq. 4.7) with probabilities 1 and 0 for winner and loser."""
    chosen, rejected = pairs.log_ratios
    return (chosen - 0.5 / params.beta) ** 2 + (rejected + 0.5 / params.beta) ** 2


@register_preference_loss("apo_zero")
def apo_zero(pairs: PairLogps, params: Beta) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7): chosen up, rejected down."""
    chosen, rejected = pairs.log_ratios
    return 1 - torch.sigmoid(params.beta * chosen) + torch.sigmoid(params.beta * rejected)


@register_preference_loss("apo_down")
def apo_down(pairs: PairLogps, params: Beta) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8): both down, rejected more."""
    chosen, rejected = pairs.log_ratios
    return torch.sigmoid(params.beta * chosen) + 1 - torch.sigmoid(params.beta * (chosen - rejected))


@register_preference_loss("discopop", params=Discopop)
def discopop(pairs: PairLogps, params: Discopop) -> Tensor:
    """DiscoPOP (Lu et al. 2024, arXiv 2406.08414, eq. 5): logistic and exponential loss, blended by the margin."""
    logits = params.beta * pairs.margin
    blend = torch.sigmoid(logits / params.discopop_tau)
    return -F.logsigmoid(logits) * (1 - blend) + torch.exp(-logits) * blend


@register_preference_loss("simpo", params=SimPo, reference=False, per_token=True)
def simpo(pairs: PairLogps, params: SimPo) -> Tensor:
    """SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6): log-probs per token, and a target margin.

    TRL adds an NLL term of weight 1 (`cpo_alpha`) unless it is set to 0; here the paper's 0 is the default.
    """
    chosen, rejected = pairs.mean_log_ratios
    return smoothed_logistic(params.beta * (chosen - rejected) - params.simpo_gamma, params.label_smoothing)


@register_preference_loss("orpo", reference=False, nll_weight=1.0, nll_of_prompt=True, per_token=True)
def orpo(pairs: PairLogps, params: Beta) -> Tensor:
    """ORPO's odds-ratio term (Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7), without its NLL term:
    -beta log sigmoid(log(odds(chosen) / odds(rejected))), odds(p) = p / (1 - p), p per token."""
    chosen, rejected = pairs.mean_log_ratios
    return -params.beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0, accurate at both ends."""
    rest = torch.where(log_prob > -math.log(2), torch.log(-torch.expm1(log_prob)), torch.log1p(-torch.exp(log_prob)))
    return log_prob - rest


@register_preference_loss("kto", params=Kto, paired=False)
def kto(log_ratios: Tensor, labels: Tensor, kl: Tensor, params: Kto) -> Tensor:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7): losses, (B,).

    Args:
        log_ratios: log(pi / pi_ref), (B,).
        labels: bool (B,), whether a response is good.
        kl: a scalar without gradient, at least 0: the mean log-ratio of responses with other prompts than their own,
            over the whole mini-batch.
    """
    signs = torch.where(labels, 1.0, -1.0).to(log_ratios.dtype)
    weights = torch.where(labels, params.desirable_weight, params.undesirable_weight).to(log_ratios.dtype)
    return weights * (1 - torch.sigmoid(params.beta * signs * (log_ratios - kl)))
