"""Causal attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcrl.model.exact import exact_attention
from hpcrl.model.packed import PackedTokens
from hpcrl.model.rope import apply_rope


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: rotary embedding, then attention inside each packed sequence.

    Tokens are gathered into (N, heads, L, head_dim), padded at the end; as attention is causal no token sees the
    padding behind it, so no mask is built.
    """

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedTokens,
        **_: object,
    ) -> Tensor:
        """`query` (S, heads, d), `key` and `value` (S, groups, d) of this rank -> (S, heads * d)."""
        packed = packed_seq_params
        output = self.attend(
            _unpack(apply_rope(query, packed.cos, packed.sin), packed),
            _unpack(apply_rope(key, packed.cos, packed.sin), packed),
            _unpack(value, packed),
        )
        return _Repack.apply(output.transpose(1, 2).flatten(0, 1), packed.slots, query.size(0)).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` (N, heads, L, d), `key` and `value` (N, groups, L, d) -> (N, heads, L, d)."""
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.size(1) != key.size(1))


class ExactPackedAttention(PackedAttention):
    """The same, with the bits that the native engine's exact mode gets."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.unflatten(1, (key.size(1), -1)).transpose(2, 3)
        positions = torch.arange(query.size(2), device=query.device).unsqueeze(0)
        return exact_attention(grouped, key, value, positions).transpose(2, 3).flatten(1, 2)


def _unpack(x: Tensor, packed: PackedTokens) -> Tensor:
    """(S, heads, d) -> (N, heads, L, d)."""
    padded = _Unpack.apply(x, packed.sources, packed.slots)
    return padded.unflatten(0, (packed.num_sequences, packed.longest)).transpose(1, 2)


class _Unpack(torch.autograd.Function):
    """Packed (S, ...) -> padded (N * L, ...).

    What lies in the padding is arbitrary and its gradient is 0, so that the backward pass gathers too: it neither adds
    up nor clears anything.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = x.size(0)
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _gather_and_fill(grad, slots, ctx.size), None, None


class _Repack(torch.autograd.Function):
    """Padded (N * L, ...) -> packed (S, ...), 0 for the padding tokens at the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.padded_size = x.size(0)
        return _gather_and_fill(x, slots, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.padded_size, *grad.shape[1:])
        return padded.index_copy_(0, slots, grad[: slots.numel()]), None, None


def _gather_and_fill(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Rows `index` of `x`, then rows of 0 up to `size`."""
    if index.numel() == size:
        return x.index_select(0, index)
    filled = x.new_zeros(size, *x.shape[1:])
    torch.index_select(x, 0, index, out=filled[: index.numel()])
    return filled
