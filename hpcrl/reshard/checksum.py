"""Checksums of weights that compose over shards: equal whatever the layout that holds them."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLS = 0x2545F4914F6CDD1D, 0x9E3779B97F4A7C15  # so that row n and column n have different hashes
_COLS_AT_ONCE = 1024
SCRATCH_PER_ELEMENT = 48  # bytes of temporary memory per element that is worked on at once, at most


def odd_hashes(start: int, stop: int, salt: int, device: torch.device) -> Tensor:
    """int64 (stop - start,): an odd number for each index, from the finaliser of splitmix64 (Steele et al. 2014)."""
    x = torch.arange(start, stop, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def checksum(values: Tensor, row: int, col: int, dtype: torch.dtype, scratch_bytes: int = 2**20) -> int:
    """Sum over elements of bits(x) times an odd hash of the global index, modulo 2^64.

    `values` (rows, cols) are the part of a global tensor that starts at (row, col); what is summed is their bits after
    rounding to `dtype`. The hash of an index is the product of its row's and its column's. A change of one element, of
    any of its bits, always changes the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    at_once = max(1, scratch_bytes // SCRATCH_PER_ELEMENT)
    width = min(values.size(1), _COLS_AT_ONCE, at_once)
    height = max(1, at_once // width)
    bits = _BITS[dtype.itemsize]
    for left in range(0, values.size(1), width):
        block = values[:, left : left + width]
        of_col = odd_hashes(col + left, col + left + block.size(1), _COLS, values.device)
        for top in range(0, values.size(0), height):
            part = block[top : top + height]
            of_row = odd_hashes(row + top, row + top + part.size(0), _ROWS, values.device)
            words = part.to(dtype).view(bits).to(torch.int64, copy=True)
            total += (words.mul_(of_col).sum(1) * of_row).sum()
    return int(total) % 2**64


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; that of torch keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
