"""Checksums of weights that compose over shards of any layout."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FLOATS, use_triton

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Salts, so that row n and column n have different hashes, and the numbers of splitmix64, as int64.
ROWS, COLS = 0x2545F4914F6CDD1D, 0x9E3779B97F4A7C15 - 2**64
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
COLS_AT_ONCE = 1024
SCRATCH_PER_ELEMENT = 48  # bytes of temporary memory per element that is worked on at once, at most


def odd_hashes(start: int, stop: int, salt: int, device: torch.device) -> Tensor:
    """Return int64 (stop - start,): an odd hash of each index, by the finaliser of splitmix64 (Steele et al. 2014)."""
    x = torch.arange(start, stop, device=device) * STEP + salt
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) | 1


def add_checksum(
    total: Tensor, values: Tensor, row: int, col: int, dtype: torch.dtype, scratch_bytes: int = 2**20
) -> None:
    """Add to `total`, int64 without dimensions, the sum over elements of bits(x) times an odd hash of the global index,
    modulo 2^64.

    `values` (rows, cols) are the part of a global tensor that starts at (row, col); the bits are taken after rounding
    to `dtype`. The hash of an index is the product of its row's and its column's. A change of any bit of one element
    always changes the sum. Moves the values in; without the kernel also `scratch_bytes` of temporary memory.
    """
    strided = "" if values.stride(1) == 1 else "columns lie apart"
    if use_triton("checksum", values, unless=strided if dtype in FLOATS else f"no kernel for {dtype}"):
        from hpcrl.kernels.checksum_triton import add_checksum as fused

        fused(total, values, row, col, dtype)
        return
    at_once = max(1, scratch_bytes // SCRATCH_PER_ELEMENT)
    width = min(values.size(1), COLS_AT_ONCE, at_once)
    height = max(1, at_once // width)
    bits = BITS[dtype.itemsize]
    for first_col in range(0, values.size(1), width):
        block = values[:, first_col : first_col + width]
        of_col = odd_hashes(col + first_col, col + first_col + block.size(1), COLS, values.device)
        for first_row in range(0, values.size(0), height):
            part = block[first_row : first_row + height]
            of_row = odd_hashes(row + first_row, row + first_row + part.size(0), ROWS, values.device)
            words = part.to(dtype).view(bits).to(torch.int64, copy=True)
            total += (words.mul_(of_col).sum(1) * of_row).sum()


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
