"""Kernels of exact mode in Triton; their references are in `hpcrl.model.exact`. A row of a product has the same bits
for any number and place of rows. One kernel of attention is for training, prefill and decode, and its results for a
query do not depend on the queries beside it."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.chips import chip_of

WIDE = 16384  # outputs, from which on tiles of 128 columns occupy a GPU even for a few rows
GROUP = 8  # tiles of rows that share a tile of the weight in the L2 cache
ALIGNED = 16  # bytes; other addresses would be compiled to another kernel
MASKED = tl.constexpr(-1e30)  # finite, so that differences are not NaN
LOG2_E = math.log2(math.e)
SMALLEST_DOT = 16  # minimum rows and columns of a product
KEYS = {2: 64, 4: 32}  # at a time at most, by the bytes of a number: products of fp32 are sums in registers


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x, weight, y, rows, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_TERMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y (rows, COLUMNS) = x (rows, TERMS) times weight (COLUMNS, TERMS) transposed, all contiguous; sums in fp32.

    A program adds all terms in order, and rows of a tile are independent: nothing depends on `rows` but what is stored.
    """
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(COLUMNS, BLOCK_COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    inner = program % (GROUP * column_tiles)
    row = ((first + inner % size) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (inner // size * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    term = tl.arange(0, BLOCK_TERMS)
    x_at = x + row[:, None] * TERMS + term[None, :]
    weight_at = weight + column[None, :] * TERMS + term[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, TERMS, BLOCK_TERMS):
        inside = term < TERMS - start
        left = tl.load(x_at + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_at + start, mask=(column < COLUMNS)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(y + row[:, None] * COLUMNS + column[None, :], total.to(y.dtype.element_ty), mask=inside)


def launch(columns: int, itemsize: int) -> tuple[dict[str, int], int]:
    """Return the constants and warps for a weight of `columns` outputs: never by the number of rows."""
    if itemsize == 4:  # products of fp32 are sums in registers
        return {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 64, "BLOCK_TERMS": 32, "GROUP": GROUP}, 4
    wide = 128 if columns >= WIDE else 64
    return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": wide, "BLOCK_TERMS": 64, "GROUP": GROUP}, 8


def exact_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x (rows, k) and weight (n, k) of one dtype -> (rows, n) in `dtype`."""
    (rows, terms), columns = x.shape, len(weight)
    y = x.new_empty(rows, columns, dtype=dtype)
    sizes: dict[str, Any]
    sizes, num_warps = launch(columns, x.element_size())
    if y.numel():
        grid = triton.cdiv(rows, sizes["BLOCK_ROWS"]) * triton.cdiv(columns, sizes["BLOCK_COLUMNS"])
        multiply[(grid,)](
            aligned(x), aligned(weight), y, rows, COLUMNS=columns, TERMS=terms, **sizes, num_warps=num_warps
        )
    return y


def aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy if it is not contiguous or its address would be compiled to another kernel."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNED == 0 else x.clone(memory_format=torch.contiguous_format)


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
    """Return the constants of the Triton kernel.

    Args:
        shared_bytes: bytes of shared memory, of which a third is for keys at most. Where they are 64 KiB, as on AMD,
            more keys would spill registers.
    """
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
