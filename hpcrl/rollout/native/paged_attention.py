"""Decode attention that reads the blocks of a row where they are, for GPUs."""

from __future__ import annotations

from copy import copy

import numpy as np
from torch import Tensor

from hpcrl.kernels.decode_attention import Cut, PagedRows, decode_attention, is_fused
from hpcrl.rollout.native.attention import NewTokens
from hpcrl.rollout.native.block_pool import FREE
from hpcrl.rollout.native.kv_cache import KVCache


class PagedAttention:
    """One token of each of rows 0..n-1, as `DecodeAttention`."""

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        pool, heads = new.cache.pool, new.cache.heads
        used = np.flatnonzero(pool.row_of[: pool.extent] != FREE)
        starts = pool.count_of.cumsum() - pool.count_of
        by_row = np.empty_like(used)
        by_row[starts[pool.row_of[used]] + pool.order_of[used]] = used
        self._cut = Cut.of(heads.groups, heads.queries, heads.value_dim)
        self._rows = PagedRows.of(
            by_row, starts[new.rows], new.starts + 1, new.cache.block_size, self._cut, new.cache.device
        )

    @staticmethod
    def fits(cache: KVCache) -> bool:
        """Whether there are kernels for it."""
        return is_fused(cache.keys[0], cache.values[0])

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        cache = self.new.cache
        return decode_attention(
            queries, cache.keys[layer], cache.values[layer], self._rows, scale=queries.size(-1) ** -0.5
        )

    def with_room(self, rows: int) -> PagedAttention:
        """One that `load` fills: its tensors are for up to `rows` rows of any lengths that the cache can hold."""
        other = copy(self)
        other.new = self.new.empty_like(rows)
        other._rows = self._rows._replace(
            blocks=self._rows.blocks.new_zeros(self.new.cache.num_blocks),
            parts=self._rows.parts.new_zeros(rows + self._cut.wanted, 4),
            parts_of=self._rows.parts_of.new_zeros(rows, 2),
        )
        return other

    def load(self, other: PagedAttention) -> None:
        """Takes the rows of `other`; those that it has more repeat the first, which is computed once."""
        self._rows.blocks[: len(other._rows.blocks)] = other._rows.blocks
        self._rows.parts[: len(other._rows.parts)] = other._rows.parts
        self._rows.parts[len(other._rows.parts) :] = 0
        fill(self._rows.parts_of, other._rows.parts_of)
        for own, given in zip(self.new.tensors, other.new.tensors, strict=True):
            fill(own, given)


def fill(to: Tensor, of: Tensor) -> None:
    """`of`, then its first row as often as `to` has room."""
    to[: len(of)] = of
    to[len(of) :] = of[0]
