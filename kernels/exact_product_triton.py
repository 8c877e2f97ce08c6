"""Matrix products of exact mode in Triton: a row of the result has the same bits for any number and place of rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 16384  # outputs, from which on tiles of 128 columns occupy a GPU even for a few rows
GROUP = 8  # tiles of rows that share a tile of the weight in the L2 cache
ALIGNED = 16  # bytes; other addresses would be compiled to another kernel


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
