"""RMSNorm as the module in megatron's layer spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

LATENT_NORM_EPS = 1e-6  # of the latents of attention, in all models that have them, whatever their other norms'


class RMSNorm(torch.nn.Module):
    """Megatron's norm interface; its own torch wrapper refuses sequence parallelism.

    The native rollout engine calls the same function, so that their log-probs agree.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)
