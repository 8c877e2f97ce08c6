"""The rotary embedding of the tokens of one call: as the training model does it, and with fewer operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.rope import apply_rope
from hpcrl.model.rope import rope_cos_sin
from hpcrl.model.shape import ModelShape

# positions int64 (n,) -> what rotates heads (n, KV heads, heads, head_dim)
Rotation = Callable[[Tensor, ModelShape], Callable[[Tensor], Tensor]]


class PlainRope:
    """The bits of the training model."""

    def __init__(self, positions: Tensor, shape: ModelShape) -> None:
        self._cos, self._sin = rope_cos_sin(positions[:, None], shape.rope_dim, shape.rope_theta, shape.rope_scaling)

    def __call__(self, heads: Tensor) -> Tensor:
        return apply_rope(heads, self._cos, self._sin)


class FastRope(PlainRope):
    """The same but for rounding: where there is no kernel for it, a product and a sum of products, with the halves of
    each head changed over."""

    def __call__(self, heads: Tensor) -> Tensor:
        if use_triton("rope", heads):
            return super().__call__(heads)
        cos, sin = self._doubled
        heads32 = heads.float()
        turned = torch.addcmul(heads32 * cos, heads32.roll(heads.size(-1) // 2, -1), sin)
        return turned.to(heads.dtype)

    @cached_property
    def _doubled(self) -> tuple[Tensor, Tensor]:
        """For both halves of a head, (n, 1, 1, head_dim)."""
        cos, sin = self._cos.unsqueeze(-2), self._sin.unsqueeze(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
