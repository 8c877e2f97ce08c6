"""Estimators, losses and statistics: torch and numpy alone, no ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrl.algorithms.advantages.lookup import advantage
    from hpcrl.algorithms.policy_losses.lookup import policy_loss

__all__ = ["advantage", "policy_loss"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: both need torch, and a login node takes other things from here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpcrl.algorithms.advantages.lookup import advantage
    from hpcrl.algorithms.policy_losses.lookup import policy_loss

    return advantage if name == "advantage" else policy_loss
