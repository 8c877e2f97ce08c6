"""Copies of rectangles in Triton: a program moves one tile, and a table names the tile's rectangle."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.dispatch import FP8
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.kernels.pack import Pairs

TILE_BYTES = 2**15  # of the wider dtype
MAX_VECTORS = 2048  # in a tile: the addresses that 256 threads can hold
ACCESS_BYTES = 16  # bytes of one access
MAX_ROW = 2**30  # numbers; offsets within a tile are 32-bit from the start of a row
NUM_WARPS = 8
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, FP8: tl.float8e4nv}

# columns of a table: the first tile of a rectangle; both addresses; rows, vectors in a row; numbers from row to row;
# address of the scales of rows
FIELDS = tl.constexpr(8)


@triton.jit
def copy(
    table, owner, FROM: tl.constexpr, ROUNDED: tl.constexpr, TO: tl.constexpr, FROM_BYTES: tl.constexpr,
    TO_BYTES: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tile i is TILE vectors of rectangle owner[i], row after row. VECTOR neighbours are moved at once: their addresses
    are multiples of FROM_BYTES and TO_BYTES, which the compiler cannot derive from a table. With ROUNDED, a dtype, what
    is rounded to it is quantised, as by `Fp8Matrix.copy_`."""
    tile = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(owner + tile).to(tl.int64) * FIELDS
    first = (tile - tl.load(entry)) * TILE
    source = tl.load(entry + 1).to(tl.pointer_type(FROM))
    destination = tl.load(entry + 2).to(tl.pointer_type(TO))
    rows, width = tl.load(entry + 3), tl.load(entry + 4)
    source_stride, destination_stride = tl.load(entry + 5), tl.load(entry + 6)

    top = first // width
    place = (first - top * width).to(tl.int32) + tl.arange(0, TILE)
    down = place // width.to(tl.int32)
    column = (place - down * width.to(tl.int32)).to(tl.int64)
    row = top + down
    inside = (row < rows)[:, None]
    lane = tl.arange(0, VECTOR)[None, :]
    source += (row * source_stride + column * VECTOR)[:, None] + lane
    destination += (row * destination_stride + column * VECTOR)[:, None] + lane
    values = tl.load(tl.multiple_of(source, (FROM_BYTES, FROM_BYTES)), mask=inside)
    if ROUNDED is not None:
        scales = tl.load(entry + 7).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + row, mask=row < rows, other=1.0)[:, None]
        values = tl.div_rn(values.to(ROUNDED).to(tl.float32), tl.broadcast_to(scale, (TILE, VECTOR)))
    tl.store(tl.multiple_of(destination, (TO_BYTES, TO_BYTES)), values.to(TO), mask=inside)


class Launch(NamedTuple):
    """table: int64 (rectangles, FIELDS); owner: int32 (tiles,). rounded: the dtype of an `Fp8Matrix`; None: others."""

    table: Tensor
    owner: Tensor
    source: torch.dtype
    rounded: torch.dtype | None
    destination: torch.dtype
    vector: int


def launches(pairs: Pairs, device: torch.device) -> list[Launch]:
    """Return the fewest launches that copy all of `pairs`, with the widest possible accesses."""
    by_dtypes: dict[tuple[torch.dtype, torch.dtype | None, torch.dtype], list[tuple[int, ...]]] = defaultdict(list)
    for source, destination in pairs:
        rounded, scales = None, 0
        if isinstance(destination, Fp8Matrix):
            rounded, scales, destination = destination.dtype, destination.scales.data_ptr(), destination.numbers
        (rows, cols), (source_stride, _), (destination_stride, _) = source.shape, source.stride(), destination.stride()
        if rows and cols:
            ends = source.data_ptr(), destination.data_ptr(), rows, cols, source_stride, destination_stride, scales
            by_dtypes[source.dtype, rounded, destination.dtype].append(ends)
    batches = []
    for (source_dtype, rounded, destination_dtype), entries in by_dtypes.items():
        rectangles = np.array(entries, np.int64)
        if rounded is None:
            rectangles = _merged(rectangles)
        vectors = _vectors(rectangles, source_dtype.itemsize, destination_dtype.itemsize)
        for vector in np.unique(vectors).tolist():
            table, owner = _tiled(rectangles[vectors == vector], vector, _tile(source_dtype, destination_dtype, vector))
            on_device = [torch.from_numpy(part).to(device) for part in (table, owner)]
            batches.append(Launch(on_device[0], on_device[1], source_dtype, rounded, destination_dtype, vector))
    return batches


def copy_all(launches: list[Launch]) -> None:
    for table, owner, source, rounded, destination, vector in launches:
        constants = copy_constants(source, rounded, destination, vector)
        copy[(len(owner),)](table, owner, **constants, num_warps=NUM_WARPS)


def copy_constants(
    source: torch.dtype, rounded: torch.dtype | None, destination: torch.dtype, vector: int
) -> dict[str, Any]:
    return {
        "FROM": DTYPES[source],
        "ROUNDED": None if rounded is None else DTYPES[rounded],
        "TO": DTYPES[destination],
        "FROM_BYTES": min(ACCESS_BYTES, vector * source.itemsize),
        "TO_BYTES": min(ACCESS_BYTES, vector * destination.itemsize),
        "VECTOR": vector,
        "TILE": _tile(source, destination, vector),
    }


def _tile(source: torch.dtype, destination: torch.dtype, vector: int) -> int:
    """Vectors per program."""
    return min(MAX_VECTORS, TILE_BYTES // (vector * max(source.itemsize, destination.itemsize)))


def _merged(rectangles: np.ndarray) -> np.ndarray:
    """Turn rectangles without gaps between their rows into one long row. (n, 7): addresses, rows, cols, strides, and
    the address of scales, which none has."""
    source, destination, rows, cols, source_stride, destination_stride, scales = rectangles.T
    dense = (rows == 1) | ((source_stride == cols) & (destination_stride == cols) & (rows * cols < MAX_ROW))
    rows, cols = np.where(dense, 1, rows), np.where(dense, rows * cols, cols)
    strides = (np.where(dense, cols, stride) for stride in (source_stride, destination_stride))
    return np.stack([source, destination, rows, cols, *strides, scales], 1)


def _vectors(rectangles: np.ndarray, source_size: int, destination_size: int) -> np.ndarray:
    """Return how many numbers of each rectangle go in one access, a power of 2 that divides the start and end of all
    rows."""
    source, destination, _, *sizes = rectangles.T[:6]
    widths = np.ones(len(rectangles), np.int64)
    vector = 2
    while vector * min(source_size, destination_size) <= ACCESS_BYTES:
        fits = np.all([size % vector == 0 for size in sizes], axis=0)
        for address, size in ((source, source_size), (destination, destination_size)):
            fits &= address % min(ACCESS_BYTES, vector * size) == 0
        widths[fits] = vector
        vector *= 2
    return widths


def _tiled(rectangles: np.ndarray, vector: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a launch's table and owners."""
    source, destination, rows, cols, source_stride, destination_stride, scales = rectangles.T
    width = cols // vector
    tiles = -(-rows * width // tile)
    first = np.cumsum(tiles) - tiles
    table = np.stack([first, source, destination, rows, width, source_stride, destination_stride, scales], 1)
    return np.ascontiguousarray(table), np.repeat(np.arange(len(tiles), dtype=np.int32), tiles)
