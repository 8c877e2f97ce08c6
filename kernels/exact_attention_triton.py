"""Attention of exact mode in Triton: one kernel for training, prefill and decode, whose results for a query do not
depend on the queries beside it."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.chips import chip_of
from hpcrl.kernels.exact_product_triton import aligned

MASKED = tl.constexpr(-1e30)  # finite, so that differences are not NaN
LOG2_E = math.log2(math.e)
SMALLEST_DOT = 16  # minimum rows and columns of a product
KEYS = {2: 64, 4: 32}  # at a time at most, by the bytes of a number: products of fp32 are sums in registers


# One machine code for training, prefill and decode, whose tables have other addresses.
@triton.jit(do_not_specialize_on_alignment=["blocks", "tiles"])
def attend(
    queries, keys, values, blocks, tiles, outputs, scale, HEADS: tl.constexpr, PER_HEAD: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of 2, over KEYS positions at a time,
    from position 0 on; one program per tile of tokens and KV head.

    A query reads the same keys in the same steps in any tile. Steps after its own position change nothing: their
    weights are 0, its maximum stays, and its sums are multiplied by 1.
    """
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    first, count = tl.load(tile), tl.load(tile + 1)
    position, start = tl.load(tile + 2), tl.load(tile + 3)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, query = row // PER_HEAD, row % PER_HEAD
    real = token < count
    at = (((first + token).to(tl.int64) * HEADS + head) * PER_HEAD + query)[:, None] * WIDTH + column[None, :]
    inside = real[:, None] & (column < WIDTH)[None, :]
    own = tl.load(queries + at, mask=inside, other=0.0)
    maximum = tl.full((ROWS,), MASKED, tl.float32)
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, position + count, KEYS):
        place = begin + tl.arange(0, KEYS)
        valid = place < position + count
        block = tl.load(blocks + start + place // SIZE, mask=valid, other=0)
        of_head = (block.to(tl.int64) * HEADS + head) * (SIZE * WIDTH)
        key_at = (of_head + place % SIZE)[None, :] + column[:, None] * SIZE
        key = tl.load(keys + key_at, mask=valid[None, :] & (column < WIDTH)[:, None], other=0.0)
        scores = tl.dot(own, key, input_precision="ieee") * scale
        scores = tl.where(place[None, :] <= (position + token)[:, None], scores, MASKED)
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        factor = tl.exp2(maximum - higher)
        value_at = (of_head + place % SIZE * WIDTH)[:, None] + column[None, :]
        value = tl.load(values + value_at, mask=valid[:, None] & (column < WIDTH)[None, :], other=0.0)
        total_weight = total_weight * factor + tl.sum(weights, 1)
        total = tl.dot(weights.to(value.dtype), value, total * factor[:, None], input_precision="ieee")
        maximum = higher
    tl.store(outputs + at, (total / total_weight[:, None]).to(outputs.dtype.element_ty), mask=inside)


def constants(
    groups: int, per_head: int, width: int, size: int, itemsize: int, tokens: int, shared_bytes: int
) -> dict[str, Any]:
    """shared_bytes: a third is for keys at most. Where they are 64 KiB, as on AMD, more keys would spill registers."""
    rows, block = (max(SMALLEST_DOT, triton.next_power_of_2(count)) for count in (tokens * per_head, width))
    fitting = 1 << (shared_bytes // 3 // (block * itemsize)).bit_length() - 1
    sizes = {"KEYS": min(KEYS[itemsize], fitting), "ROWS": rows, "WIDTH": width, "BLOCK": block}
    return {"HEADS": groups, "PER_HEAD": per_head, "SIZE": size, **sizes}


def options(width: int) -> dict[str, int]:
    """Return warps and stages with which nothing spills on an A100."""
    return {"num_warps": 4, "num_stages": 3} if width <= 64 else {"num_warps": 8, "num_stages": 2}


def attention(queries: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, tiles: Tensor, tokens: int) -> Tensor:
    """`hpcrl.model.exact.paged_attention`."""
    _, groups, per_head, width = queries.shape
    outputs, shared_bytes = queries.new_empty(queries.shape), chip_of(queries.device).shared_bytes
    if len(tiles):
        attend[(len(tiles), groups)](
            aligned(queries), aligned(keys), aligned(values), blocks, tiles, outputs, width**-0.5 * LOG2_E,
            **constants(groups, per_head, width, keys.size(-1), keys.element_size(), tokens, shared_bytes),
            **options(width),
        )  # fmt: skip
    return outputs
