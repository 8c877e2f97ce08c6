"""Policy losses: log-probs and advantages of tokens to one number, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpcrl.algorithms.aggregation import LossNorm, aggregate
from hpcrl.algorithms.metrics import finish

# importing a family registers its losses
from hpcrl.algorithms.policy_losses import covariance, losses  # noqa: F401
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.policy_losses.registry import LOSSES, PolicyLoss, register_policy_loss

__all__ = ["PolicyLossConfig", "get_policy_loss", "policy_loss", "register_policy_loss"]


def get_policy_loss(name: str) -> PolicyLoss:
    return LOSSES.get(name)


def policy_loss(
    name: str,
    *,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Mapping[str, Any] | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a batch that is the whole mini-batch, a scalar with gradients for `log_prob`, and verl's metrics.

    All tensors (B, T) in fp32 or fp64, advantages and weights (B, 1) too, log-probs in nats; response_mask bool, int or
    float, and where it is 0 the others may hold anything. config: verl's keys below `actor`
    (`PolicyLossConfig.from_mapping`). clip_cov draws from torch's global generator.

    Divisors are `LossNorm.of_whole`, as verl's for one micro-batch. For a micro-batch of a larger mini-batch, give
    that one's counts in `global_batch_info` {dp_size, batch_num_tokens, global_batch_size, loss_scale_factor}, as verl
    does: the losses of the micro-batches then add up to the mini-batch's, times dp_size. Quirk of verl: geo_mean looks
    at none of them. loss_agg_mode is token-mean unless given, for gspo too, where verl's function has
    seq-mean-token-mean.
    """
    cfg = PolicyLossConfig.from_mapping(config)
    columns = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    _check_shapes(response_mask, columns | {"rollout_is_weights": rollout_is_weights})
    token_losses = get_policy_loss(name)(log_prob, old_log_prob, advantages, response_mask, cfg, rollout_is_weights)
    mask = response_mask if token_losses.response_mask is None else token_losses.response_mask
    if token_losses.values.ndim == 1:  # a loss per sequence: it counts the empty ones too
        loss = aggregate(token_losses, mask, loss_agg_mode, LossNorm(float(mask.sum()), float(len(mask))))
    else:
        norm = _norm(cfg, mask, token_losses.loss_agg_mode or loss_agg_mode)
        loss = aggregate(token_losses, mask, loss_agg_mode, norm) * cfg.dp_size
    return loss, finish(token_losses.metrics)


def _norm(cfg: PolicyLossConfig, mask: torch.Tensor, mode: str) -> LossNorm:
    """The counts of `global_batch_info`; of the batch itself where it has none."""
    here = LossNorm.of_whole(mask, cfg.loss_scale_factor)
    tokens, sequences = cfg.batch_num_tokens, cfg.global_batch_size
    name, count = ("batch_num_tokens", tokens) if mode == "token-mean" else ("global_batch_size", sequences)
    if cfg.dp_size > 1 and count is None and mode != "token-sum":
        raise ValueError(
            f"global_batch_info has dp_size {cfg.dp_size} and no {name}, which loss_agg_mode={mode} divides by; "
            "give that of all replicas"
        )
    return LossNorm(
        here.batch_num_tokens if tokens is None else float(tokens),
        here.global_batch_size if sequences is None else float(sequences),
        here.loss_scale_factor,
    )


def _check_shapes(mask: torch.Tensor, columns: Mapping[str, torch.Tensor | None]) -> None:
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
