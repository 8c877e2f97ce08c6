"""The rotary embedding of the tokens of one call: as the training model does it, and with fewer operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.model.rope import apply_rope, rope_cos_sin

# positions int64 (n,), head_dim, theta -> what rotates heads (n, KV heads, heads, head_dim)
Rotation = Callable[[Tensor, int, float], Callable[[Tensor], Tensor]]


class PlainRope:
    """The bits of the training model."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        self._cos, self._sin = rope_cos_sin(positions[:, None], head_dim, theta)

    def __call__(self, heads: Tensor) -> Tensor:
        return apply_rope(heads, self._cos, self._sin)


class FastRope:
    """The same but for rounding: a product and a sum of products, with the halves of each head changed over."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        cos, sin = rope_cos_sin(positions[:, None, None], head_dim, theta)
        self._half = head_dim // 2
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def __call__(self, heads: Tensor) -> Tensor:
        heads32 = heads.float()
        turned = torch.addcmul(heads32 * self._cos, heads32.roll(self._half, -1), self._sin)
        return turned.to(heads.dtype)
