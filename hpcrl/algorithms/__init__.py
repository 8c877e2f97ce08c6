"""Estimators, losses and statistics: torch and numpy alone, no ranks."""

from hpcrl.algorithms.advantages import advantage
from hpcrl.algorithms.policy_losses import policy_loss

__all__ = ["advantage", "policy_loss"]
