"""The KV cache: its blocks, the block table of each sequence, and the keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.model.sizes import CachedHeads

FREE = -1


class Moves(NamedTuple):
    """Blocks whose content must be copied from `sources` to `targets`, int64 (n,) each."""

    sources: np.ndarray
    targets: np.ndarray


class BlockPool:
    """Blocks of `block_size` tokens, assigned to the rows of the running batch.

    The blocks in use are nearly dense, 0..`extent`-1 with few holes, so that attention on the CPU reads one slice
    without gathering. All int64: `row_of` (blocks,) is the row that has a block, or FREE; `order_of` (blocks,) the part
    of the row's tokens that it holds; `tail_of` (rows,) a row's last block; `count_of` (rows,) its number of blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.extent = 0
        self.num_free = num_blocks
        self.row_of = np.full(num_blocks, FREE, np.int64)
        self.order_of = np.zeros(num_blocks, np.int64)
        self.tail_of = np.zeros(num_rows, np.int64)
        self.count_of = np.zeros(num_rows, np.int64)

    @property
    def num_holes(self) -> int:
        return self.extent - (self.num_blocks - self.num_free)

    def missing(self, rows: np.ndarray | slice, num_tokens: np.ndarray) -> np.ndarray:
        """Return how many blocks each of `rows` lacks to hold `num_tokens`, int64 (n,) both."""
        return np.maximum(-(-num_tokens // self.block_size) - self.count_of[rows], 0)

    def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Assign to each of `rows` the blocks it lacks to hold `num_tokens`. Return the new blocks, int64 (n,)."""
        missing = self.missing(rows, num_tokens)
        blocks = self._take(int(missing.sum()))
        ends = missing.cumsum()
        self.row_of[blocks] = rows.repeat(missing)
        self.order_of[blocks] = (
            self.count_of[rows].repeat(missing) + np.arange(len(blocks)) - (ends - missing).repeat(missing)
        )
        self.count_of[rows] += missing
        grown = missing > 0
        self.tail_of[rows[grown]] = blocks[ends[grown] - 1]
        return blocks

    def _take(self, count: int) -> np.ndarray:
        if count > self.num_free:
            raise RuntimeError(f"the KV cache has {self.num_free} free blocks; {count} are needed")
        if not count:
            return np.zeros(0, np.int64)
        holes = np.flatnonzero(self.row_of[: self.extent] == FREE)[:count]
        appended = np.arange(self.extent, self.extent + count - len(holes))
        self.extent += len(appended)
        self.num_free -= count
        return np.concatenate([holes, appended])

    def blocks_of(self, row: int) -> np.ndarray:
        """Return the blocks of `row` in the order of its tokens, int64 (n,)."""
        blocks = np.flatnonzero(self.row_of[: self.extent] == row)
        return blocks[self.order_of[blocks].argsort()]

    def table(self, rows: np.ndarray) -> np.ndarray:
        """Return the blocks of `rows` in the order of their tokens, int64 (n, most blocks of a row), 0 after a row's
        last block."""
        table = np.zeros((len(rows), int(self.count_of[rows].max(initial=0))), np.int64)
        for place, row in enumerate(rows):
            table[place, : self.count_of[row]] = self.blocks_of(row)
        return table

    def release(self, rows: np.ndarray) -> None:
        freed = np.flatnonzero(np.isin(self.row_of[: self.extent], rows))
        self.row_of[freed] = FREE
        self.num_free += len(freed)
        self.count_of[rows] = 0

    def renumber(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Rename rows `sources` to `targets`, which have no blocks."""
        new_row = np.arange(-1, len(self.tail_of))  # by old row + 1, as FREE is -1
        new_row[sources + 1] = targets
        self.row_of[: self.extent] = new_row[self.row_of[: self.extent] + 1]
        self.tail_of[targets] = self.tail_of[sources]
        self.count_of[targets] = self.count_of[sources]
        self.count_of[sources] = 0

    def compact(self) -> Moves:
        """Move the last blocks in use into the holes."""
        used = self.num_blocks - self.num_free
        sources = used + np.flatnonzero(self.row_of[used : self.extent] != FREE)
        targets = np.flatnonzero(self.row_of[:used] == FREE)
        rows = self.row_of[sources]
        was_tail = self.tail_of[rows] == sources
        self.row_of[targets], self.order_of[targets] = rows, self.order_of[sources]
        self.row_of[sources] = FREE
        self.tail_of[rows[was_tail]] = targets[was_tail]
        self.extent = used
        return Moves(sources, targets)


MOVED_AT_ONCE = 8


class Scratch(NamedTuple):
    """Temporary tensors of decoding, per block in use. They are part of the cache, so that memory stays constant.

    `queries` (blocks, heads, key_dim), `scores` (blocks, heads, block size), `weights` the same but fp32, `products`
    (blocks, heads, value_dim), `bias` (blocks, 1, block size) fp32.
    """

    queries: Tensor
    scores: Tensor
    weights: Tensor
    products: Tensor
    bias: Tensor


@dataclass(eq=False)
class KVCache:
    """`keys` are (layers, blocks, KV heads of this rank, key_dim, block size), the order that products with queries
    need; `values` (layers, blocks, KV heads, block size, value_dim), which may be a view of the keys.

    `pool` maps rows of the running batch to blocks; it starts empty with each generation.
    """

    num_layers: int
    num_blocks: int
    heads: CachedHeads
    block_size: int
    num_rows: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.keys.numel() > 0

    def allocate(self) -> None:
        # Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN.
        heads, size = self.heads, (self.num_layers, self.num_blocks, self.heads.groups)
        self.keys = _zeros((*size, heads.key_dim, self.block_size), self.dtype, self.device)
        if heads.value_in_key:
            self.values = self.keys[..., : heads.value_dim, :].transpose(-1, -2)
        else:
            self.values = _zeros((*size, self.block_size, heads.value_dim), self.dtype, self.device)
        num_queries = heads.groups * heads.queries
        self.scratch = Scratch(
            queries=self._empty(num_queries, heads.key_dim),
            scores=self._empty(num_queries, self.block_size),
            weights=self._empty(num_queries, self.block_size, dtype=torch.float32),
            products=self._empty(num_queries, heads.value_dim),
            bias=self._empty(1, self.block_size, dtype=torch.float32),
        )
        self.clear()

    def _empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty((self.num_blocks, *size), dtype=dtype or self.dtype, device=self.device)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self.dtype, device=self.device)
        del self.scratch

    def clear(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, self.num_rows)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` (n, KV heads, key_dim) and `values` (n, KV heads, value_dim) of n tokens at `offsets` in
        `blocks`, int64 (n,)."""
        self.keys[layer].permute(0, 3, 1, 2)[blocks, offsets] = keys
        if not self.heads.value_in_key:
            self.values[layer].transpose(1, 2)[blocks, offsets] = values

    def used(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys (items, key_dim, block size) and values (items, block size, value_dim).

        An item is a KV head of a block, all heads of a block in a row, up to the last block in use.
        """
        extent = self.pool.extent
        return self.keys[layer, :extent].flatten(0, 1), self.values[layer, :extent].flatten(0, 1)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies (rows, KV heads, blocks of the table x block size, key_dim or value_dim) for a
        `BlockPool.table`, int64.

        Values after a row's last token are arbitrary, but finite.
        """
        keys = self.keys[layer][table].permute(0, 2, 1, 4, 3).flatten(2, 3)
        return keys, self.values[layer][table].transpose(1, 2).flatten(2, 3)

    def move(self, moves: Moves) -> None:
        """Copy blocks; no block is both source and target. A few at a time, because copies go through a buffer."""
        both = [torch.from_numpy(blocks).to(self.device).split(MOVED_AT_ONCE) for blocks in moves]
        for sources, targets in zip(*both, strict=True):
            for plane in (self.keys,) if self.heads.value_in_key else (self.keys, self.values):
                plane[:, targets] = plane[:, sources]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Unlike torch's, numpy's zeros are pages that the system allocates when they are first written.
    return torch.from_numpy(np.zeros(int(np.prod(size)) * dtype.itemsize, np.uint8)).view(dtype).view(size)
