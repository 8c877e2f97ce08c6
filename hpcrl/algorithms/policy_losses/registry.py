"""Policy losses by name, and what is common to all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from hpcrl.algorithms.aggregation import TokenLosses
from hpcrl.algorithms.policy_losses.config import PolicyLossConfig
from hpcrl.algorithms.registry import Registry

LossFunction: TypeAlias = Callable[..., TokenLosses]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss: padding cleared, the function called, its losses weighted by the mismatch correction."""

    name: str
    function: LossFunction
    takes: frozenset[str]  # the names in the function's signature

    def __call__(
        self,
        log_prob: torch.Tensor,
        old_log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        cfg: PolicyLossConfig,
        rollout_is_weights: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> TokenLosses:
        """Losses before aggregation. All tensors (B, T), B may be 0; log-probs in nats, only `log_prob` carries
        gradients; response_mask is bool, int or float.

        Where the mask is 0 the others may hold anything, NaN too. rollout_is_weights: importance weights of training
        against rollout; they multiply the losses and carry no gradient. generator: for a loss that draws; None is
        torch's own.
        """
        padding = response_mask == 0
        log_prob, old_log_prob, advantages = (
            x.masked_fill(padding, 0.0) for x in (log_prob, old_log_prob.detach(), advantages.detach())
        )
        weights = None if rollout_is_weights is None else rollout_is_weights.detach().masked_fill(padding, 0.0)
        given: dict[str, Any] = {"rollout_is_weights": weights, "generator": generator}
        options = {name: value for name, value in given.items() if name in self.takes}
        losses = self.function(log_prob, old_log_prob, advantages, response_mask, cfg, **options)
        if weights is None or "rollout_is_weights" in self.takes:
            return losses
        return replace(losses, values=losses.values * weights)

    def check(self, cfg: PolicyLossConfig) -> None:
        """Raises what the loss has against `cfg`, without data: it runs on no sequences."""
        nothing = torch.zeros(0, 1)
        self(nothing, nothing, nothing, nothing, cfg)


LOSSES: Registry[PolicyLoss] = Registry("policy_loss.loss_mode")


def register_policy_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """Makes `actor.policy_loss.loss_mode=<name>` call the decorated function.

    It gets (log_prob, old_log_prob, advantages, response_mask, cfg), finite where the mask is 0, and returns
    `TokenLosses`. If its signature names `generator` it gets that too; if it names `rollout_is_weights` it gets them
    and weights its losses itself.
    """

    def register(function: LossFunction) -> LossFunction:
        LOSSES.add(name, PolicyLoss(name, function, frozenset(inspect.signature(function).parameters)))
        return function

    return register
