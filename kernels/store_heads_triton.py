"""The heads of a decoded token in Triton: one program per token and KV head."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.store_heads import CacheSlots, HeadWeights


@triton.jit(do_not_specialize=["stride"])
def store(
    mixed, bias, query_norm, key_norm, cos, sin, queries, keys, values, blocks, offsets, stride, eps,
    BIAS: tl.constexpr, NORM: tl.constexpr, GROUPS: tl.constexpr, PER_HEAD: tl.constexpr, HALF: tl.constexpr,
    SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `mixed` have `stride`; a KV head has PER_HEAD queries, a key and a value of 2 HALF numbers."""
    WIDTH: tl.constexpr = 2 * HALF
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = mixed.dtype.element_ty
    block, offset = tl.load(blocks + token), tl.load(offsets + token)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head <= PER_HEAD) & (column < HALF)
    begin = group * ((PER_HEAD + 2) * WIDTH)
    place = begin + head * WIDTH + column
    first = tl.load(mixed + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(mixed + token * stride + place + HALF, mask=inside, other=0.0).to(tl.float32)
    of_value = tl.arange(0, 2 * BLOCK)
    value_place = begin + (PER_HEAD + 1) * WIDTH + of_value
    value = tl.load(mixed + token * stride + value_place, mask=of_value < WIDTH, other=0.0).to(tl.float32)
    if BIAS:
        first = (first + tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        second = (second + tl.load(bias + place + HALF, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        value += tl.load(bias + value_place, mask=of_value < WIDTH, other=0.0).to(tl.float32)
    if NORM:
        of_key = head == PER_HEAD
        here = column < HALF
        scale = (1.0 / tl.sqrt_rn(tl.sum(first * first + second * second, 1) / WIDTH + eps))[:, None]
        for_query = tl.load(query_norm + column, mask=here, other=0.0).to(tl.float32)
        for_key = tl.load(key_norm + column, mask=here, other=0.0).to(tl.float32)
        first = (first * scale * tl.where(of_key, for_key, for_query)).to(dtype).to(tl.float32)
        for_query = tl.load(query_norm + column + HALF, mask=here, other=0.0).to(tl.float32)
        for_key = tl.load(key_norm + column + HALF, mask=here, other=0.0).to(tl.float32)
        second = (second * scale * tl.where(of_key, for_key, for_query)).to(dtype).to(tl.float32)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0)
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0)
    new_first, new_second = (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)
    is_query = inside & (head < PER_HEAD)
    out = queries + ((token * GROUPS + group) * PER_HEAD + head) * WIDTH + column
    tl.store(out, new_first, mask=is_query)
    tl.store(out + HALF, new_second, mask=is_query)
    item = block * GROUPS + group
    out = keys + (item * WIDTH + column) * SIZE + offset + head * 0
    cached = keys.dtype.element_ty  # may have 8 bits, to which fp32 is converted
    is_key = inside & (head == PER_HEAD)
    tl.store(out, new_first.to(tl.float32).to(cached), mask=is_key)
    tl.store(out + HALF * SIZE, new_second.to(tl.float32).to(cached), mask=is_key)
    value = value.to(dtype).to(tl.float32).to(cached)
    tl.store(values + (item * SIZE + offset) * WIDTH + of_value, value, mask=of_value < WIDTH)


def constants(groups: int, per_head: int, head_dim: int, size: int) -> dict[str, Any]:
    return {
        "GROUPS": groups, "PER_HEAD": per_head, "HALF": head_dim // 2, "SIZE": size,
        "HEADS": triton.next_power_of_2(per_head + 1), "BLOCK": triton.next_power_of_2(head_dim // 2),
    }  # fmt: skip


def store_heads(mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor, slots: CacheSlots) -> Tensor:
    n, columns = mixed.shape
    groups, head_dim, size = slots.keys.shape[1:]
    per_head = columns // (groups * head_dim) - 2
    queries = mixed.new_empty(n, groups, per_head, head_dim)
    absent = mixed  # of a pointer that is not read
    store[(n, groups)](
        mixed, absent if weights.bias is None else weights.bias,
        absent if weights.query_norm is None else weights.query_norm,
        absent if weights.key_norm is None else weights.key_norm,
        cos, sin, queries, slots.keys, slots.values, slots.blocks, slots.offsets, mixed.stride(0), weights.eps,
        BIAS=weights.bias is not None, NORM=weights.query_norm is not None,
        **constants(groups, per_head, head_dim, size),
    )  # fmt: skip
    return queries
