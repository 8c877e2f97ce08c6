"""The distance of the policy from the reference: estimators, the penalty in the reward, its controllers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpcrl.algorithms.aggregation import masked_mean
from hpcrl.algorithms.metrics import Mean, Metric
from hpcrl.algorithms.parameters import UnknownName, param

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KlKind = Literal[KlEstimator, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]  # value of one, gradient of k2


@dataclass(frozen=True)
class KlCtrl:
    """`algorithm.kl_ctrl`: the controller of the weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = param("fixed", help="KL controller")
    kl_coef: float = param(0.001, ge=0, help="weight of the KL penalty in the reward at the start")
    horizon: int = param(10000, gt=0, help="samples over which the adaptive controller reacts")
    target_kl: float = param(0.1, gt=0, help="KL that the adaptive controller aims at")


REWARD_KL_PENALTY = "actor/reward_kl_penalty"  # metric that a controller follows


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy | reference) at each sampled token, shape of the inputs, in nats.

    With d = log_prob - ref_log_prob (Schulman, joschu.net/blog/kl-approx.html): kl, k1: d; abs: |d|; mse, k2: d^2 / 2;
    low_var_kl, k3: clamp(exp(-d) - 1 + d, -10, 10), its -d clamped to [-20, 20] (verl's bounds).
    With a `+` behind it (k1+, low_var_kl+, ...) the value is the kind's and the gradient that of k2, unclamped: in
    expectation over the policy's own samples it is the gradient of the KL, which that of k1 and k3 is not.
    """
    if kind.endswith("+"):
        square = kl_penalty(log_prob, ref_log_prob, "k2")
        return square - square.detach() + kl_penalty(log_prob, ref_log_prob, kind[:-1]).detach()
    difference = log_prob - ref_log_prob
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            back = (-difference).clamp(-20.0, 20.0)
            return (back.exp() - back - 1).clamp(-10.0, 10.0)
        case "full":
            raise UnknownName("KL kind 'full' needs the logits of the whole vocabulary, which are not kept; use k3")
    known = "kl (k1), abs, mse (k2), low_var_kl (k3), each also with a + behind it"
    raise UnknownName(f"unknown KL kind {kind!r}; there are {known}")


def apply_kl_in_reward(
    token_level_scores: Tensor, log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, *, beta: float, kind: str
) -> tuple[Tensor, dict[str, Metric]]:
    """token_level_rewards = scores - beta kl mask, all (B, T) (Ziegler et al. 2019, arXiv 1909.08593, eq. 2).

    `actor/reward_kl_penalty` is the mean over sequences of each one's mean KL per token: what a controller follows.
    """
    kl = kl_penalty(log_prob, ref_log_prob, kind).detach().masked_fill(response_mask == 0, 0.0)
    per_sequence = masked_mean(kl.double(), response_mask, dim=-1)
    return token_level_scores - beta * kl * response_mask, {
        REWARD_KL_PENALTY: Mean(per_sequence.sum(), float(len(kl))),
        "actor/reward_kl_penalty_coeff": Mean(beta, 1.0),
    }


class KLController:
    """`value` is the weight beta of the penalty.

    Adaptive: beta *= 1 + clip(KL / target - 1, -0.2, 0.2) n_samples / horizon (Ziegler et al. 2019, section 2.2).
    """

    def __init__(self, params: KlCtrl) -> None:
        self.params, self.value = params, params.kl_coef
        self.is_adaptive = params.type == "adaptive"

    def update(self, current_kl: float, n_samples: int) -> None:
        """Change the weight by the KL of a step, if it is adaptive.

        Args:
            current_kl: `actor/reward_kl_penalty` of the whole step.
            n_samples: sequences of the step.
        """
        if self.is_adaptive and n_samples > 0:
            error = min(max(current_kl / self.params.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n_samples / self.params.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value} if self.is_adaptive else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed weight is the configured one: a changed `kl_coef` takes effect on resume."""
        if self.is_adaptive:
            self.value = state["value"]
