"""On-policy distillation: the distance from a teacher on the policy's own samples, one number per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

from hpcrl.algorithms.aggregation import token_mean
from hpcrl.algorithms.kl import KlEstimator, kl_penalty
from hpcrl.algorithms.metrics import Max, Mean, Metric, Min
from hpcrl.algorithms.parameters import Registry, param, parameters_of
from hpcrl.algorithms.policy_losses import POLICY_LOSSES, Clip, DualClip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Distillation(Clip):
    """`distillation.distillation_loss`, with verl's names and the defaults of its YAML.

    Quirks of verl: its dataclass has other defaults (topk 128, loss_max_clamp 10, log_prob_min_clamp -10,
    use_policy_gradient true), which its YAML overrides; `kl` passes the check that stops the supervised `k1`, though
    it is the same estimator, whose gradient does not depend on the teacher.
    """

    loss_mode: str = param("k3", help="estimator on sampled tokens, or forward KL over the teacher's likeliest tokens")
    topk: int = param(32, gt=0, help="forward_kl_topk: tokens of the teacher")
    use_task_rewards: bool = param(True, help="keep the policy loss on rewards; false: distillation only")
    distillation_loss_coef: float = param(1.0, ge=0, help="weight of the distillation loss")
    loss_max_clamp: float | None = param(None, gt=0, help="token losses are clamped to +- this; null: not")
    log_prob_min_clamp: float | None = param(
        None, help="forward_kl_topk: log-probs below this count as this, in nats; null: not"
    )
    use_policy_gradient: bool = param(False, help="the negative loss of a token is its advantage")
    policy_loss_mode: str = param("vanilla", help="use_policy_gradient: policy loss, clipped as given here")

    def __post_init__(self) -> None:
        super().__post_init__()
        DISTILLATION_LOSSES.get(self.loss_mode)
        if self.policy_loss_mode != "vanilla":
            raise ValueError(f"policy_loss_mode is {self.policy_loss_mode!r}; expected vanilla, as in verl")
        if self.loss_mode == "k1" and not self.use_policy_gradient:
            raise ValueError(
                "loss_mode is k1 without use_policy_gradient: its gradient ignores the teacher; "
                "set use_policy_gradient, or take k3 or forward_kl_topk"
            )

    @property
    def coef(self) -> float:
        """Weight of the distillation loss in the total. As in verl, without task rewards it is 1 and the only term: no
        policy loss, entropy bonus or KL term."""
        return self.distillation_loss_coef if self.use_task_rewards else 1.0

    @property
    def policy_loss(self) -> DualClip:
        return DualClip(self.clip_ratio, self.clip_ratio_low, self.clip_ratio_high)


@dataclass(frozen=True)
class Distilled:
    """The inputs of a distillation loss. Log-probs in nats; log_prob and student_topk carry gradients.

    log_prob, teacher_log_prob, response_mask: (B, T), of the sampled tokens. student_topk, teacher_topk: (B, T, K),
    log-probs at the teacher's K likeliest tokens. teacher_topk_ids, student_topk_ids: (B, T, K), the K likeliest
    tokens of each, for metrics.
    """

    log_prob: Tensor
    response_mask: Tensor
    teacher_log_prob: Tensor | None = None
    student_topk: Tensor | None = None
    teacher_topk: Tensor | None = None
    student_topk_ids: Tensor | None = None
    teacher_topk_ids: Tensor | None = None


# token losses (B, T), finite where the mask is 0, and metrics
LossFunction: TypeAlias = "Callable[[Distilled, Any], tuple[Tensor, dict[str, Metric]]]"


class DistillationLoss(NamedTuple):
    name: str
    function: LossFunction
    uses_topk: bool  # it reads the teacher's likeliest tokens, else its log-prob of the sampled one
    params: type


DISTILLATION_LOSSES: Registry[DistillationLoss] = Registry("distillation_loss.loss_mode", __name__)


def register_distillation_loss(
    *names: str, uses_topk: bool = False, params: type = Distillation
) -> Callable[[LossFunction], LossFunction]:
    """Make `distillation.distillation_loss.loss_mode=<name>` call the decorated function.

    Args:
        params: a frozen dataclass that extends `Distillation`. The keys of its own fields are
            `distillation.distillation_loss.<name>.<field>`.
    """

    def register(function: LossFunction) -> LossFunction:
        parameters_of(params)
        for name in names:
            DISTILLATION_LOSSES.add(name, DistillationLoss(name, function, uses_topk, params))
        return function

    return register


def distillation_loss(
    cfg: Distillation,
    inputs: Distilled,
    *,
    old_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Token losses (B, T), to be aggregated like the policy loss, and `distillation/*` but for `distillation/loss`,
    the aggregate. Where the mask is 0 the tensors may hold anything.

    Supervised (GKD, arXiv 2306.13649): the losses themselves. use_policy_gradient (thinkingmachines.ai/blog/
    on-policy-distillation): PPO's loss with advantage -loss, which reads old_log_prob and rollout_is_weights, (B, T).
    Quirk of verl: loss_min and loss_max are taken before loss_max_clamp.
    """
    losses, metrics = DISTILLATION_LOSSES.get(cfg.loss_mode).function(inputs, cfg)
    metrics = metrics | {
        "distillation/loss_min": Min.of(losses, inputs.response_mask),
        "distillation/loss_max": Max.of(losses, inputs.response_mask),
    }
    if cfg.loss_max_clamp is not None:
        losses = losses.clamp(-cfg.loss_max_clamp, cfg.loss_max_clamp)
    if not cfg.use_policy_gradient:
        return losses, metrics
    if old_log_prob is None:
        raise ValueError("use_policy_gradient is set and old_log_prob is missing; pass the column old_log_probs")
    policy = POLICY_LOSSES.get(cfg.policy_loss_mode)(
        inputs.log_prob, old_log_prob, -losses.detach(), inputs.response_mask, cfg.policy_loss, rollout_is_weights
    )
    renamed = {key.replace("actor/", "distillation/", 1): metric for key, metric in policy.metrics.items()}
    return policy.values, metrics | renamed


@register_distillation_loss(*get_args(KlEstimator))
def sampled_token(inputs: Distilled, cfg: Distillation) -> tuple[Tensor, dict[str, Metric]]:
    """`kl_penalty` of the student against the teacher: estimates of the reverse KL on the sampled token."""
    if inputs.teacher_log_prob is None:
        raise ValueError(f"loss_mode={cfg.loss_mode} needs teacher_log_prob; pass the teacher's column")
    unused = inputs.response_mask == 0
    student, teacher = (x.masked_fill(unused, 0.0) for x in (inputs.log_prob, inputs.teacher_log_prob.detach()))
    losses = kl_penalty(student, teacher, cfg.loss_mode)
    return losses, {"distillation/abs_loss": Mean.of(losses.abs(), inputs.response_mask)}


@register_distillation_loss("forward_kl_topk", uses_topk=True)
def teachers_likeliest(inputs: Distilled, cfg: Distillation) -> tuple[Tensor, dict[str, Metric]]:
    """`forward_kl_topk`, cut below at 0: what lies outside of the K tokens can make the sum negative.

    student_mass, teacher_mass: probability of the K tokens. With the ids of both, overlap_ratio: the share of the
    teacher's K tokens that are among the student's, and overlap_token_advantage: -p (log p - log q) averaged over
    those of a position, then over positions that have any, 0 without (arXiv 2604.13016). Quirk of verl: under
    megatron it takes the masses after log_prob_min_clamp, under FSDP, and here, before.
    """
    if inputs.student_topk is None or inputs.teacher_topk is None:
        raise ValueError(f"loss_mode={cfg.loss_mode} needs student_topk and teacher_topk; pass log-probs at topk ids")
    mask = inputs.response_mask
    unused = (mask == 0).unsqueeze(-1)
    student, teacher = (x.masked_fill(unused, 0.0) for x in (inputs.student_topk, inputs.teacher_topk.detach()))
    terms = forward_kl_topk(student, teacher, cfg.log_prob_min_clamp)
    metrics: dict[str, Metric] = {}
    for name, log_probs in (("student_mass", student), ("teacher_mass", teacher)):
        mass = log_probs.detach().exp().sum(-1)
        metrics[f"distillation/{name}"] = Mean.of(mass, mask)
        metrics[f"distillation/{name}_min"] = Min.of(mass, mask)
        metrics[f"distillation/{name}_max"] = Max.of(mass, mask)
    if inputs.student_topk_ids is not None and inputs.teacher_topk_ids is not None:
        common = (inputs.teacher_topk_ids.unsqueeze(-1) == inputs.student_topk_ids.unsqueeze(-2)).any(-1)
        count = common.sum(-1)
        advantage = (-terms.detach() * common).sum(-1) / count.clamp(min=1)
        metrics["distillation/overlap_ratio"] = Mean.of(count / common.shape[-1], mask)
        metrics["distillation/overlap_token_advantage"] = token_mean(advantage, (count > 0) & (mask != 0))
    return terms.sum(-1).clamp(min=0.0), metrics


def forward_kl_topk(student_topk: Tensor, teacher_topk: Tensor, log_prob_min_clamp: float | None = None) -> Tensor:
    """Terms p (log p - log q) of KL(teacher | student) at the teacher's K likeliest tokens, (..., K), in nats.

    Both inputs are first clamped from below (no gradient there). The probabilities are not normalised over the K.

    Args:
        student_topk: log q, (..., K), carries gradients.
        teacher_topk: log p, (..., K).
    """
    if log_prob_min_clamp is not None:
        student_topk = student_topk.clamp(min=log_prob_min_clamp)
        teacher_topk = teacher_topk.clamp(min=log_prob_min_clamp)
    return teacher_topk.exp() * (teacher_topk - student_topk)
