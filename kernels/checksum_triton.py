"""Checksums in Triton: each program adds the sum of a tile to the total. Sums of integers do not depend on order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.checksum import COLS, FACTORS, ROWS, STEP

TILE = 4096  # numbers of a program
MAX_WIDTH = 1024  # maximum columns of a program
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def odd_hash(index, salt: tl.constexpr, step: tl.constexpr, first: tl.constexpr, second: tl.constexpr):
    """`hpcrl.kernels.checksum.odd_hashes`."""
    x = index * step + salt
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * first
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * second
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


@triton.jit(do_not_specialize=["height", "width", "stride", "row", "col"])
def add(
    total, values, height, width, stride, row, col, AS: tl.constexpr, WORD: tl.constexpr, ROW_SALT: tl.constexpr,
    COL_SALT: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Add to `total` that of values (height, width), whose rows have `stride` and which start at (row, col)."""
    at_row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at_col = tl.program_id(1).to(tl.int64) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (at_row < height)[:, None] & (at_col < width)[None, :]
    x = tl.load(values + at_row[:, None] * stride + at_col[None, :], mask=inside, other=0.0).to(AS)
    words = x.to(WORD, bitcast=True).to(tl.int64)
    of_col = odd_hash(at_col + col, COL_SALT, STEP, FIRST, SECOND)
    of_row = odd_hash(at_row + row, ROW_SALT, STEP, FIRST, SECOND)
    tl.atomic_add(total, tl.sum(tl.sum(words * of_col[None, :], 1) * of_row, 0))


def constants(width: int, dtype: torch.dtype) -> dict:
    cols = min(MAX_WIDTH, triton.next_power_of_2(width))
    return {
        "AS": TRITON_DTYPES[dtype], "WORD": tl.int32 if dtype.itemsize == 4 else tl.int16,
        "ROW_SALT": ROWS, "COL_SALT": COLS, "STEP": STEP, "FIRST": FACTORS[0], "SECOND": FACTORS[1],
        "TILE_ROWS": TILE // cols, "TILE_COLS": cols,
    }  # fmt: skip


def add_checksum(total: Tensor, values: Tensor, row: int, col: int, dtype: torch.dtype) -> None:
    height, width = values.shape
    sizes = constants(width, dtype)
    grid = triton.cdiv(height, sizes["TILE_ROWS"]), triton.cdiv(width, sizes["TILE_COLS"])
    add[grid](total, values, height, width, values.stride(0), row, col, **sizes)
