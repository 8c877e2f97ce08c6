"""Estimators, losses and statistics: pure functions of torch tensors, imported without torch."""

from __future__ import annotations

from hpcrl.algorithms.advantages import advantage
from hpcrl.algorithms.policy_losses import policy_loss

__all__ = ["advantage", "policy_loss"]
