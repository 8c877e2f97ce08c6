"""Estimators, losses and statistics: torch and numpy alone, no ranks."""

from hpcrl.algorithms.advantages.lookup import advantage
from hpcrl.algorithms.policy_losses.lookup import policy_loss

__all__ = ["advantage", "policy_loss"]
