"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) - sum softmax(z) z over the last dimension, in nats; (..., V) -> (...)."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
