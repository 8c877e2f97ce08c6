"""From a layer's product of queries, keys and values to what attention needs, when decoding: the bias, the norms of
heads, the rotary embedding, and the write to the KV cache, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import lacks_fp8, use_triton
from hpcrl.kernels.fp8_matrix import rounded
from hpcrl.kernels.layers import apply_rope, rms_norm

MAX_HEADS = 64  # queries of a KV head and its key, which are held in registers
MAX_HEAD_DIM = 512


class HeadWeights(NamedTuple):
    """Of one layer. bias: (columns,), as the product; query_norm and key_norm: (head_dim,). None where there is none;
    norms are given both or not at all."""

    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float


class CacheSlots(NamedTuple):
    """The places of n tokens in the cache of one layer: keys (blocks, KV heads, head_dim, block size), values (blocks,
    KV heads, block size, head_dim), both contiguous; blocks and offsets int64 (n,)."""

    keys: Tensor
    values: Tensor
    blocks: Tensor
    offsets: Tensor


def is_fused(mixed: Tensor, keys: Tensor) -> bool:
    """Whether the kernel supports products `mixed` (n, columns) and the cache of `keys` as in `CacheSlots`."""
    num_groups, head_dim = keys.shape[1:3]
    heads = mixed.size(1) // (num_groups * head_dim) - 1
    reason = lacks_fp8(keys)
    if heads > MAX_HEADS or head_dim > MAX_HEAD_DIM:
        reason = f"{heads - 1} queries of {head_dim} for each KV head"
    return use_triton("store_heads", mixed, unless=reason)


def store_heads(mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor, slots: CacheSlots) -> Tensor:
    """Write the rotated keys and the values of n tokens to the cache, and return the rotated queries.

    Returns (n, KV heads, queries of a head, head_dim) in the dtype of `mixed`; the cache may have it in float8_e4m3fn
    (not yet run on a GPU). Rounds after the bias, the norm and the rotation, as these do one by one. No gradient. Moves
    the product in, and as much out; 3 to 10 operations a number.

    Args:
        mixed: (n, KV heads x (queries of a head + 2) x head_dim), fp32, bf16 or fp16: queries, key and value of each KV
            head.
        cos, sin: fp32 (n, head_dim / 2), contiguous.
    """
    if is_fused(mixed, slots.keys):
        from hpcrl.kernels.store_heads_triton import store_heads as fused

        return fused(mixed, weights, cos, sin, slots)
    return reference(mixed, weights, cos, sin, slots)


def reference(mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor, slots: CacheSlots) -> Tensor:
    groups, head_dim = slots.keys.shape[1:3]
    if weights.bias is not None:
        mixed = mixed + weights.bias
    heads = mixed.view(len(mixed), groups, -1, head_dim)
    queries, keys = heads[:, :, :-2], heads[:, :, -2:-1]
    if weights.query_norm is not None and weights.key_norm is not None:
        queries = rms_norm(queries, weights.query_norm, weights.eps)
        keys = rms_norm(keys, weights.key_norm, weights.eps)
    rotated = apply_rope(torch.cat((queries, keys), 2), cos[:, None], sin[:, None])
    slots.keys.permute(0, 3, 1, 2)[slots.blocks, slots.offsets] = rounded(rotated[:, :, -1], slots.keys.dtype)
    slots.values.transpose(1, 2)[slots.blocks, slots.offsets] = rounded(heads[:, :, -1], slots.values.dtype)
    return rotated[:, :, :-1].contiguous()
