"""Heads that replace the language-model head on the last pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """One number per token: a linear layer without bias, in fp32, held whole by every tensor-parallel rank.

    A critic's value or a reward model's score. Its weight starts at 0: a new critic says 0 everywhere and the first
    advantages are those of no critic; a new reward model prefers nothing.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(self, hidden_states: Tensor, weight: None = None, **_: object) -> tuple[Tensor, None]:
        """(..., hidden_size) -> (..., 1) fp32, and no bias: the signature of megatron's output layer."""
        return torch.nn.functional.linear(hidden_states.float(), self.weight), None
