"""The KV cache on a device: its blocks, the block table of each sequence, and the keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.fp8_matrix import rounded
from hpcrl.model.blocks.block import CachedHeads
from hpcrl.rollout.engines.engine import CacheLayout

FREE = -1


def copy_parts(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class Moves(NamedTuple):
    """Rows `sources` that become rows `targets`, int64 (n,) each."""

    sources: np.ndarray
    targets: np.ndarray


class BlockBudget:
    """How many of `num_blocks` blocks of `block_size` tokens the rows of the running batch have: `count_of` int64
    (rows,)."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.count_of = np.zeros(num_rows, np.int64)

    def missing(self, rows: np.ndarray | slice, num_tokens: np.ndarray) -> np.ndarray:
        """Return how many blocks each of `rows` lacks to hold `num_tokens`, int64 (n,) both."""
        return np.maximum(-(-num_tokens // self.block_size) - self.count_of[rows], 0)

    def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Assign to each of `rows` the blocks it lacks to hold `num_tokens`. Return how many, int64 (n,)."""
        missing = self.missing(rows, num_tokens)
        count = int(missing.sum())
        if count > self.num_free:
            raise RuntimeError(f"the KV cache has {self.num_free} free blocks; {count} are needed")
        self.num_free -= count
        self.count_of[rows] += missing
        return missing

    def release(self, rows: np.ndarray) -> None:
        self.num_free += int(self.count_of[rows].sum())
        self.count_of[rows] = 0

    def exchange(self, moves: Moves) -> None:
        """Exchange the blocks of each source with those of its target."""
        sources, targets = moves
        self.count_of[sources], self.count_of[targets] = self.count_of[targets], self.count_of[sources]


class BlockPool(BlockBudget):
    """Blocks that are assigned to the rows of the running batch.

    Both int64 (blocks,): `row_of` is the row that has a block, or FREE; `order_of` the part of the row's tokens that it
    holds. Blocks from `extent` on are free.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        super().__init__(num_blocks, block_size, num_rows)
        self.extent = 0
        self.row_of = np.full(num_blocks, FREE, np.int64)
        self.order_of = np.zeros(num_blocks, np.int64)

    def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """As `BlockBudget.grow`, but return the new blocks, int64 (m,)."""
        before = self.count_of[rows]
        missing = super().grow(rows, num_tokens)
        blocks = self._take(int(missing.sum()))
        ends = missing.cumsum()
        self.row_of[blocks] = rows.repeat(missing)
        self.order_of[blocks] = before.repeat(missing) + np.arange(len(blocks)) - (ends - missing).repeat(missing)
        return blocks

    def _take(self, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, np.int64)
        holes = np.flatnonzero(self.row_of[: self.extent] == FREE)[:count]
        appended = np.arange(self.extent, self.extent + count - len(holes))
        self.extent += len(appended)
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
        super().release(rows)
        self.row_of[: self.extent][np.isin(self.row_of[: self.extent], rows)] = FREE

    def exchange(self, moves: Moves) -> None:
        super().exchange(moves)
        new_row = np.arange(-1, len(self.count_of))  # by old row + 1, as FREE is -1
        new_row[moves.sources + 1], new_row[moves.targets + 1] = moves.targets, moves.sources
        self.row_of[: self.extent] = new_row[self.row_of[: self.extent] + 1]


class Plane(NamedTuple):
    """Keys and values of the layers that cache the same; `values` may be a view of `keys`."""

    heads: CachedHeads
    layers: tuple[int, ...]
    keys: Tensor
    values: Tensor

    @property
    def owned(self) -> tuple[Tensor, ...]:
        """The tensors that have memory of their own."""
        return (self.keys,) if self.heads.value_in_key else (self.keys, self.values)


class LayerCache(NamedTuple):
    """What is cached of one layer."""

    heads: CachedHeads
    keys: Tensor
    values: Tensor


class LayeredCache:
    """What the layers have cached of the running batch: planes of keys and values, and states. The fields are those of
    the two kinds of cache."""

    layout: CacheLayout
    num_rows: int
    device: torch.device
    pool: BlockBudget

    def __post_init__(self) -> None:
        self.allocate()

    def allocate(self) -> None:
        self.planes = [self._plane(*kind) for kind in self.layout.heads.items()]
        self._of_layer = {
            layer: LayerCache(plane.heads, plane.keys[place], plane.values[place])
            for plane in self.planes
            for place, layer in enumerate(plane.layers)
        }
        zeros = partial(torch.zeros, device=self.device)
        # Of recurrent layers: fp32, with a row of the running batch as their first index.
        self.states = {
            layer: tuple(zeros(self.num_rows, *size) for size in state.sizes)
            for layer, state in self.layout.states.items()
        }
        self.is_allocated = True
        self.clear()

    def release(self) -> None:
        self.planes, self._of_layer, self.states, self.is_allocated = list[Plane](), {}, {}, False

    def __getitem__(self, layer: int) -> LayerCache:
        return self._of_layer[layer]

    def snapshot(self, row: int) -> list[Tensor]:
        """Return copies of what a row has in layers that do not keep all tokens."""
        return [part.clone() for part in self._fixed(row)]

    def restore(self, row: int, snapshot: Iterable[Tensor]) -> None:
        copy_parts(snapshot, self._fixed(row))

    def _fixed(self, row: int) -> Iterator[Tensor]:
        for plane in self.planes:
            if plane.heads.window is not None:
                yield from (tensor[:, self._ring(plane.heads, row)] for tensor in plane.owned)
        yield from (tensor[row] for tensors in self.states.values() for tensor in tensors)

    def clear(self) -> None:
        """Free all rows."""
        raise NotImplementedError

    def free(self, rows: np.ndarray) -> None:
        """Free the blocks of `rows`."""
        self.pool.release(rows)

    def exchange(self, moves: Moves) -> None:
        """Exchange what each source has cached with what its target has, if it has anything."""
        raise NotImplementedError

    def _plane(self, heads: CachedHeads, layers: tuple[int, ...]) -> Plane:
        raise NotImplementedError

    def _ring(self, heads: CachedHeads, row: int) -> int | slice:
        """Return the place of a row in a plane with a window, after its layer."""
        raise NotImplementedError


MOVED_AT_ONCE = 8


@dataclass(eq=False)
class KVCache(LayeredCache):
    """Keys of a layer are (blocks, KV heads of this rank, key_dim, block size), the order that products with queries
    need; values (blocks, KV heads, block size, value_dim).

    `pool` maps rows of the running batch to blocks; it starts empty with each generation. In layers with a window row r
    has the blocks from r * (blocks of the window) on, in which position p is at place p % window.
    """

    layout: CacheLayout
    num_blocks: int
    block_size: int
    num_rows: int
    dtype: torch.dtype
    device: torch.device
    pool: BlockPool = field(init=False)

    def _plane(self, heads: CachedHeads, layers: tuple[int, ...]) -> Plane:
        # Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN.
        count = self.num_blocks if heads.window is None else self.num_rows * self.ring_blocks(heads)
        size = len(layers), count, heads.groups
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        keys = zeros(*size, heads.key_dim, self.block_size)
        if heads.value_in_key:
            return Plane(heads, layers, keys, keys[..., : heads.value_dim, :].transpose(-1, -2))
        return Plane(heads, layers, keys, zeros(*size, self.block_size, heads.value_dim))

    def ring_blocks(self, heads: CachedHeads) -> int:
        """Return the blocks of a row in a layer with a window."""
        assert heads.window is not None
        return -(-heads.window // self.block_size)

    def clear(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, self.num_rows)

    def write(self, layer: int, places: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> None:
        """Store `keys` (n, KV heads, key_dim) and `values` (n, KV heads, value_dim) of n tokens at `places`."""
        (blocks, offsets), cached = places, self[layer]
        cached.keys.permute(0, 3, 1, 2)[blocks, offsets] = rounded(keys, self.dtype)
        if not cached.heads.value_in_key:
            cached.values.transpose(1, 2)[blocks, offsets] = rounded(values, self.dtype)

    def places(self, heads: CachedHeads, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where `write` stores tokens at `positions` of `rows`, int64 (n,) both: their blocks, and the offsets
        in these, int64 (n,)."""
        if heads.window is not None:
            places = positions % heads.window
            return rows * self.ring_blocks(heads) + places // self.block_size, places % self.block_size
        distinct, number = np.unique(rows, return_inverse=True)
        return self.pool.table(distinct)[number, positions // self.block_size], positions % self.block_size

    def spans(self, row: int, num_tokens: int, at_once: int) -> list[Any]:
        """Return the parts of a row's tokens, about `at_once` in each, for `read`. The last may have tokens more, with
        arbitrary but finite values."""
        blocks = self.pool.blocks_of(row)[: -(-num_tokens // self.block_size)]
        return list(torch.from_numpy(blocks).to(self.device).split(max(1, at_once // self.block_size)))

    def read(self, layer: int, span: Any) -> tuple[Tensor, Tensor]:
        """Return copies of keys (KV heads, tokens, key_dim) and values (KV heads, tokens, value_dim)."""
        _, keys, values = self[layer]
        return keys[span].permute(1, 0, 3, 2).flatten(1, 2), values[span].transpose(0, 1).flatten(1, 2)

    def read_ring(self, layer: int, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, of the tokens at `positions` int64 (tokens,) of a layer with a window."""
        heads, keys, values = self[layer]
        assert heads.window is not None
        places = positions % heads.window
        blocks, offsets = row * self.ring_blocks(heads) + places // self.block_size, places % self.block_size
        own = keys.permute(0, 3, 1, 2)[blocks, offsets], values.transpose(1, 2)[blocks, offsets]
        return own[0].transpose(0, 1), own[1].transpose(0, 1)

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of row `source` in layers that keep all tokens, a few blocks at a time, because copies
        go through a buffer."""
        count = -(-num_tokens // self.block_size)
        both = [
            torch.from_numpy(self.pool.blocks_of(row)[:count]).to(self.device).split(MOVED_AT_ONCE)
            for row in (source, target)
        ]
        for sources, targets in zip(*both, strict=True):
            for plane in self.planes:
                for tensor in plane.owned if plane.heads.window is None else ():
                    tensor[:, targets] = tensor[:, sources]

    def _ring(self, heads: CachedHeads, row: int) -> slice:
        count = self.ring_blocks(heads)
        return slice(row * count, (row + 1) * count)

    def exchange(self, moves: Moves) -> None:
        for source, target in zip(*moves, strict=True) if self.layout.has_fixed else ():
            displaced = self.snapshot(target) if self.pool.count_of[target] else []
            self.restore(target, self._fixed(source))
            if displaced:
                self.restore(source, displaced)
        self.pool.exchange(moves)
