"""Keys and values of the tokens that running sequences have behind them, in blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.model.kv_memory import CachedHeads
from hpcrl.rollout.native.block_pool import BlockPool, Moves

MOVED_AT_ONCE = 8


class Scratch(NamedTuple):
    """What decoding needs for each block in use. It is part of the cache, so that memory stays the same throughout.

    `queries` (blocks, heads, key_dim), `scores` (blocks, heads, block size), `weights` like them but fp32, `products`
    (blocks, heads, value_dim), `bias` (blocks, 1, block size) fp32.
    """

    queries: Tensor
    scores: Tensor
    weights: Tensor
    products: Tensor
    bias: Tensor


class KVCache:
    """`keys` are (layers, blocks, KV heads of this rank, key_dim, block size), as a product with queries likes them,
    `values` (layers, blocks, KV heads, block size, value_dim), which may be a view of the keys.

    `pool` says which row of the running batch has which block; it starts empty with each generation.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        heads: CachedHeads,
        block_size: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.heads = heads
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._num_layers = num_layers
        self._num_rows = num_rows
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.keys.numel() > 0

    def allocate(self) -> None:
        # Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN.
        heads, size = self.heads, (self._num_layers, self.num_blocks, self.heads.groups)
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
        self.pool = BlockPool(self.num_blocks, self.block_size, self._num_rows)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` (n, KV heads, key_dim) and `values` (n, KV heads, value_dim) of n tokens at `offsets` in
        `blocks`, int64 (n,)."""
        self.keys[layer].permute(0, 3, 1, 2)[blocks, offsets] = keys
        if not self.heads.value_in_key:
            self.values[layer].transpose(1, 2)[blocks, offsets] = values

    def used(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of keys (items, key_dim, block size) and values (items, block size, value_dim).

        An item is a KV head of a block, all heads of a block in a row, up to the last block in use.
        """
        extent = self.pool.extent
        return self.keys[layer, :extent].flatten(0, 1), self.values[layer, :extent].flatten(0, 1)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copies (rows, KV heads, blocks of the table x block size, key_dim or value_dim) for a `BlockPool.table`,
        int64.

        What lies behind a row's last token is arbitrary, but finite.
        """
        keys = self.keys[layer][table].permute(0, 2, 1, 4, 3).flatten(2, 3)
        return keys, self.values[layer][table].transpose(1, 2).flatten(2, 3)

    def move(self, moves: Moves) -> None:
        """Copies blocks, none of which is source and target; a few at a time, as copies go through a buffer."""
        both = [torch.from_numpy(blocks).to(self.device).split(MOVED_AT_ONCE) for blocks in moves]
        for sources, targets in zip(*both, strict=True):
            for plane in (self.keys,) if self.heads.value_in_key else (self.keys, self.values):
                plane[:, targets] = plane[:, sources]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Unlike torch's, numpy's zeros are pages that the system gives when they are first written.
    return torch.from_numpy(np.zeros(int(np.prod(size)) * dtype.itemsize, np.uint8)).view(dtype).view(size)
