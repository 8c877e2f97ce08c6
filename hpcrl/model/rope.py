"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-rotation form of Llama and Megatron.

The training model and the native rollout engine both call these functions, so that their log-probs agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_cos_sin(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each (..., head_dim / 2) fp32, for integer `position_ids` (...).

    Frequency i is theta^(-2 i / head_dim), eq. 15 of the paper.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids.to(torch.float32).unsqueeze(-1) * (1.0 / theta**powers)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` (..., heads, head_dim): element i pairs with element i + head_dim / 2. Keeps the dtype of `x`.

    `cos` and `sin` are (..., head_dim / 2) from `rope_cos_sin`: one row per token, the same for all heads.
    """
    return _Rope.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rope(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: 5 operations where autograd would record 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None
