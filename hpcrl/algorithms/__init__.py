"""Estimators, losses and statistics, also of rollout against training log-probs: pure functions of torch tensors; and
optimizers. No rank and no model; the folder is imported without torch."""

from __future__ import annotations

from hpcrl.algorithms.advantages import advantage
from hpcrl.algorithms.policy_losses import policy_loss

__all__ = ["advantage", "policy_loss"]
