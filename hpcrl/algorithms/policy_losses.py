"""Policy losses by name: what is common to all of them, and the function for notebooks.

The losses themselves, with their parameters, are in `surrogate_losses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from hpcrl.algorithms.aggregation import LossNorm, TokenLosses, aggregate
from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.parameters import Registry, flat_config, make, param, parameters_of, torch
from hpcrl.algorithms.rollout_correction import RolloutCorrection, preset

if TYPE_CHECKING:
    from torch import Tensor

LossFunction: TypeAlias = Callable[..., TokenLosses]

# The actor's other keys, verl's and hpcrl's: a whole `actor` section may be given.
OTHER_KEYS = frozenset(
    """calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed engine entropy_checkpointing
    entropy_coeff entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower fsdp_config
    grad_clip grad_offload kl_loss_coef kl_loss_type loss_agg_mode megatron model_config optim optimizer_offload
    pad_to_length param_offload policy_loss.loss_mode ppo_epochs
    ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu ppo_mini_batch_size profile profiler qat rollout_n router_replay separate_old_log_prob
    shuffle strategy torchtitan ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_kl_loss
    use_prefix_grouper use_remove_padding use_rollout_log_probs use_torch_compile veomni""".split()
)


@dataclass(frozen=True)
class Clip:
    """The range of the ratio; keys of `actor`.

    Quirk of verl that is not kept: its ActorConfig has 0.2 for clip_ratio_low and clip_ratio_high, so that a
    `clip_ratio` without them has no effect.
    """

    clip_ratio: float = param(0.2, ge=0, help="ratio is clipped to 1 - this and 1 + this")
    clip_ratio_low: float = param(None, ge=0, help="clipped below at 1 - this; null: clip_ratio")
    clip_ratio_high: float = param(None, ge=0, help="clipped above at 1 + this; null: clip_ratio")

    def __post_init__(self) -> None:
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.clip_ratio)


@dataclass(frozen=True)
class DualClip(Clip):
    """The clip range, and a bound of the ratio for negative advantages."""

    clip_ratio_c: float = param(
        3.0, gt=1, help="dual-clip bound for negative advantages; dppo_*: bound of the ratio (20 in its paper)"
    )


@dataclass(frozen=True)
class GlobalBatchInfo:
    """`policy_loss`: the mini-batch that a micro-batch is part of; null: the tensors given are all of it."""

    dp_size: float = param(1.0, gt=0, help="the loss is multiplied by this, for frameworks that average gradients")
    batch_num_tokens: float | None = param(None, help="tokens")
    global_batch_size: float | None = param(None, help="sequences")
    loss_scale_factor: float | None = param(
        None, gt=0, help="divisor of seq-mean-token-sum-norm, tokens; null: the padded width"
    )


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss: padding cleared, the function called, its losses weighted by the mismatch correction."""

    name: str
    function: LossFunction
    takes: frozenset[str]  # the names in the function's signature
    params: type  # its parameter dataclass

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        params: Any,
        rollout_is_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> TokenLosses:
        """Losses before aggregation. All tensors (B, T), B may be 0; log-probs in nats, only `log_prob` carries
        gradients; response_mask is bool, int or float.

        Where the mask is 0 the others may hold anything, NaN too.

        Args:
            params: an instance of the loss's parameter dataclass.
            rollout_is_weights: importance weights of training against rollout; they multiply the losses and carry no
                gradient.
            generator: for a loss that draws; None is torch's own.
        """
        padding = response_mask == 0
        log_prob, old_log_prob, advantages = (
            x.masked_fill(padding, 0.0) for x in (log_prob, old_log_prob.detach(), advantages.detach())
        )
        weights = None if rollout_is_weights is None else rollout_is_weights.detach().masked_fill(padding, 0.0)
        given: dict[str, Any] = {"rollout_is_weights": weights, "generator": generator}
        options = {name: value for name, value in given.items() if name in self.takes}
        losses = self.function(log_prob, old_log_prob, advantages, response_mask, params, **options)
        if weights is None or "rollout_is_weights" in self.takes:
            return losses
        return replace(losses, values=losses.values * weights)

    def parameters(self, config: Mapping[str, Any] | None = None) -> Any:
        """The loss's parameters from verl's keys below `actor`, as `policy_loss` takes them."""
        return make(self.params, _values(config))

    def check(self, params: Any) -> None:
        """Run the loss on an empty batch, so that it raises ValueError for wrong parameters."""
        nothing = torch.zeros(0, 1)
        self(nothing, nothing, nothing, nothing, params)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy_loss.loss_mode", "hpcrl.algorithms.surrogate_losses")


def register_policy_loss(name: str, params: type = DualClip) -> Callable[[LossFunction], LossFunction]:
    """Make `actor.policy_loss.loss_mode=<name>` call the decorated function.

    The function gets (log_prob, old_log_prob, advantages, response_mask, params), finite where the mask is 0, and
    returns `TokenLosses`. If its signature names `generator` it gets that too; if it names `rollout_is_weights` it gets
    them and weights its losses itself.

    Args:
        params: a frozen dataclass (see `hpcrl.algorithms.parameters`). Its keys are `actor.policy_loss.<name>.<field>`;
            fields that it inherits from `Clip` or `DualClip` have the values of `actor` unless set there.
    """

    def register(function: LossFunction) -> LossFunction:
        parameters_of(params)
        takes = frozenset(inspect.signature(function).parameters)
        POLICY_LOSSES.add(name, PolicyLoss(name, function, takes, params))
        return function

    return register


def policy_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Mapping[str, Any] | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch that is the whole mini-batch, a scalar with gradients for `log_prob`, and verl's metrics.

    All tensors (B, T) in fp32 or fp64, advantages and weights (B, 1) too, log-probs in nats; response_mask bool, int or
    float, and where it is 0 the others may hold anything. Quirks of verl: `clip_ratio_c`, where it is not given, is 20
    for the dppo losses and 3 for the dual clip. clip_cov draws from torch's global generator.

    Divisors are `LossNorm.of_whole`, as verl's for one micro-batch. For a micro-batch of a larger mini-batch, give
    that one's counts in `global_batch_info` {dp_size, batch_num_tokens, global_batch_size, loss_scale_factor}, as verl
    does: the losses of the micro-batches then add up to the mini-batch's, times dp_size. Quirk of verl: geo_mean looks
    at none of them. loss_agg_mode is token-mean unless given, for gspo too, where verl's function has
    seq-mean-token-mean.

    Args:
        config: verl's keys below `actor`, nested or dotted ("policy_loss.clip_cov_ratio"), or a whole config that has
            them; keys that no policy loss reads are ignored, unknown ones are a ValueError, and a null is verl's
            default.
    """
    policy = POLICY_LOSSES.get(name)
    params, batch = policy.parameters(config), make(GlobalBatchInfo, _values(config))
    columns = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    _check_shapes(response_mask, columns | {"rollout_is_weights": rollout_is_weights})
    token_losses = policy(log_prob, old_log_prob, advantages, response_mask, params, rollout_is_weights)
    mask = response_mask if token_losses.response_mask is None else token_losses.response_mask
    if token_losses.values.ndim == 1:  # a loss per sequence: it counts the empty ones too
        loss = aggregate(token_losses, mask, loss_agg_mode, LossNorm(float(mask.sum()), float(len(mask))))
    else:
        norm = _norm(batch, mask, token_losses.loss_agg_mode or loss_agg_mode)
        loss = aggregate(token_losses, mask, loss_agg_mode, norm) * batch.dp_size
    return loss, finish(token_losses.metrics)


def _values(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Field -> value of the parameters of all losses, from verl's keys below `actor`."""
    from hpcrl.algorithms.surrogate_losses import ActorParameters, PolicyLossParameters

    correction = "policy_loss.rollout_correction"
    places = {
        "": ActorParameters,
        "policy_loss": PolicyLossParameters,
        correction: RolloutCorrection,
        "global_batch_info": GlobalBatchInfo,
        **{f"policy_loss.{name}": entry.params for name, entry in POLICY_LOSSES.entries().items()},
    }
    fields = {
        ".".join(filter(None, (place, parameter.name))): parameter.name
        for place, declaration in places.items()
        for parameter in parameters_of(declaration)
    }
    given = flat_config(config, "actor", [*fields, "loss_scale_factor", f"{correction}.preset"], OTHER_KEYS)
    chosen = given.pop(f"{correction}.preset", None)
    scale = given.pop("loss_scale_factor", None)
    if given.get("global_batch_info.loss_scale_factor") is None:  # where verl's losses read it
        given["global_batch_info.loss_scale_factor"] = scale
    return (asdict(preset(chosen)) if chosen is not None else {}) | {fields[key]: given[key] for key in given}


def _norm(batch: GlobalBatchInfo, mask: Tensor, mode: str) -> LossNorm:
    """The counts of `global_batch_info`; of the batch itself where it has none."""
    here = LossNorm.of_whole(mask, batch.loss_scale_factor)
    tokens, sequences = batch.batch_num_tokens, batch.global_batch_size
    name, count = ("batch_num_tokens", tokens) if mode == "token-mean" else ("global_batch_size", sequences)
    if batch.dp_size > 1 and count is None and mode != "token-sum":
        raise ValueError(
            f"global_batch_info has dp_size {batch.dp_size} and no {name}, which loss_agg_mode={mode} divides by; "
            "give that of all replicas"
        )
    return LossNorm(
        here.batch_num_tokens if tokens is None else float(tokens),
        here.global_batch_size if sequences is None else float(sequences),
        here.loss_scale_factor,
    )


def _check_shapes(mask: Tensor, columns: Mapping[str, Tensor | None]) -> None:
    for name, value in {"response_mask": mask, **columns}.items():
        if value is None and name == "rollout_is_weights":
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor (samples, tokens)")
        if mask.ndim != 2:
            raise ValueError(f"response_mask is {tuple(mask.shape)}; expected (samples, tokens)")
        per_sequence = name in ("advantages", "rollout_is_weights") and value.shape == (len(mask), 1)
        if value.shape != mask.shape and not per_sequence:
            raise ValueError(f"{name} is {tuple(value.shape)} beside response_mask {tuple(mask.shape)}; expected alike")
