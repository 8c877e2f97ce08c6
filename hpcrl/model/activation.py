"""SwiGLU as the module in megatron's layer spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrl.kernels.swiglu import swiglu


class SwiGLU(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Nothing: megatron's MLP asks each of its modules."""
        return {}
