"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): as a function, and as the module in megatron's layer spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32, in the dtype of `x`.

    The training model and the native rollout engine both call this function, so that their log-probs agree.
    """
    return torch.nn.functional.rms_norm(x, (x.size(-1),), weight, eps)


class RMSNorm(torch.nn.Module):
    """Megatron's norm interface; its own torch wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)
