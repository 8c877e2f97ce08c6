"""The KV cache on the CPU: the keys and values of a sequence in one piece."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.fp8_matrix import rounded
from hpcrl.model.blocks.block import CachedHeads
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.kv_cache import BlockBudget, LayeredCache, Moves, Plane, copy_parts
from hpcrl.runtime.exits import InputError

NO_RESERVE = 0x4000  # MAP_NORESERVE; the module has it from Python 3.13 on


@dataclass(eq=False)
class RowCache(LayeredCache):
    """Keys of a layer are (rows, KV heads, tokens, key_dim), and values (rows, KV heads, tokens, value_dim). Rows are
    those of the running batch.

    Every row has room for `row_tokens` tokens, the longest sequence, in virtual memory: the system provides a page when
    it is first written. `pool` keeps what is written below `num_blocks` blocks in all, and pages of rows that have left
    are returned. In layers with a window a row has as many tokens, and position p is at place p % window.
    """

    layout: CacheLayout
    num_blocks: int
    block_size: int
    num_rows: int
    row_tokens: int
    dtype: torch.dtype

    device = torch.device("cpu")

    def __post_init__(self) -> None:
        self._is_overcommitted = self.num_rows * self.row_tokens > self.num_blocks * self.block_size
        super().__post_init__()

    def allocate(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}  # by the address of the tensor in it
        super().allocate()

    def _plane(self, heads: CachedHeads, layers: tuple[int, ...]) -> Plane:
        size = len(layers), self.num_rows, heads.groups, heads.window or self.row_tokens
        keys = self._zeros(*size, heads.key_dim)
        if heads.value_in_key:
            return Plane(heads, layers, keys, keys[..., : heads.value_dim])
        return Plane(heads, layers, keys, self._zeros(*size, heads.value_dim))

    def _zeros(self, *size: int) -> Tensor:
        """Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN."""
        nbytes = int(np.prod(size)) * self.dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            memory = mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            raise InputError(
                f"the system does not provide {nbytes:,} bytes of virtual memory for the KV cache ({error.strerror}); "
                "lower rollout.max_num_seqs, or shorten prompts and responses"
            ) from None
        with suppress(OSError):  # of kernels without huge pages, which take memory as a whole when a part is written
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(size)
        self._maps[tensor.data_ptr()] = memory
        return tensor

    def release(self) -> None:
        super().release()
        self._maps.clear()

    def clear(self) -> None:
        if self._is_overcommitted:
            for memory in self._maps.values():
                memory.madvise(mmap.MADV_DONTNEED)
        self.pool = BlockBudget(self.num_blocks, self.block_size, self.num_rows)

    def places(self, heads: CachedHeads, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray]:
        """Return where `write` stores tokens at `positions` of `rows`, int64 (n,) both: int64 (n x KV heads,), places
        of heads in a layer."""
        of_heads = rows[:, None] * heads.groups + np.arange(heads.groups)
        places = positions if heads.window is None else positions % heads.window
        return ((of_heads * (heads.window or self.row_tokens) + places[:, None]).ravel(),)

    def write(self, layer: int, places: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> None:
        """Store `keys` (n, KV heads, key_dim) and `values` (n, KV heads, value_dim) of n tokens at `places`."""
        (places_of_heads,), cached = places, self[layer]
        for plane, new in ((cached.keys, keys), (cached.values, values))[: 2 - cached.heads.value_in_key]:
            of_heads, rows = plane.flatten(0, 2), rounded(new.reshape(-1, new.size(-1)), self.dtype)
            if self.dtype.itemsize == 1:  # torch does not copy rows of 8-bit floats
                of_heads, rows = of_heads.view(torch.uint8), rows.view(torch.uint8)
            of_heads.index_copy_(0, places_of_heads, rows)

    def spans(self, row: int, num_tokens: int, at_once: int) -> list[Any]:
        """Return the parts of a row's tokens, `at_once` at most in each, for `read`."""
        firsts = range(0, num_tokens, at_once)
        return [(row, slice(first, min(first + at_once, num_tokens))) for first in firsts]

    def read(self, layer: int, span: Any) -> tuple[Tensor, Tensor]:
        """Return views of keys (KV heads, tokens, key_dim) and values (KV heads, tokens, value_dim)."""
        row, tokens = span
        return self[layer].keys[row, :, tokens], self[layer].values[row, :, tokens]

    def read_ring(self, layer: int, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, copies of the tokens at `positions` int64 (tokens,) of a layer with a window."""
        heads, keys, values = self[layer]
        assert heads.window is not None
        places = positions % heads.window
        return keys[row, :, places], values[row, :, places]

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of row `source` in layers that keep all tokens."""
        for plane in self.planes:
            for tensor in plane.owned if plane.heads.window is None else ():
                tensor[:, target, :, :num_tokens] = tensor[:, source, :, :num_tokens]

    def _ring(self, heads: CachedHeads, row: int) -> int:
        return row

    def free(self, rows: np.ndarray) -> None:
        super().free(rows)
        self._drop(rows)

    def exchange(self, moves: Moves) -> None:
        for source, target in zip(*moves, strict=True):
            of_source, of_target = (self.pool.count_of[[source, target]] * self.block_size).tolist()
            displaced = [part.clone() for part in self._parts(target, of_target)]
            if displaced:
                self._drop(np.array([target]))
            copy_parts(self._parts(source, of_source), self._parts(target, of_source))
            self._drop(np.array([source]))
            copy_parts(displaced, self._parts(source, of_target))
        self.pool.exchange(moves)

    def _parts(self, row: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield views of what a row of `num_tokens` tokens has; none if it has no token."""
        if num_tokens:
            for plane in self.planes:
                for tensor in plane.owned if plane.heads.window is None else ():
                    yield tensor[:, row, :, :num_tokens]
            yield from self._fixed(row)

    def reorder(self, order: np.ndarray) -> None:
        """Make row `order[i]` row i, for int64 (n,), a permutation of the first n rows."""
        num_tokens = self.pool.count_of[order] * self.block_size
        for plane in self.planes:
            of_rows = np.minimum(num_tokens, plane.heads.window or self.row_tokens)
            for tensor in plane.owned:
                for layer in range(len(plane.layers)):
                    if self._is_overcommitted:
                        self._reorder_within_budget(tensor, layer, order, of_rows)
                    else:
                        used = tensor[layer, : len(order), :, : of_rows.max(initial=0)]
                        used.copy_(used[torch.from_numpy(order)])
        for state in (tensor for tensors in self.states.values() for tensor in tensors):
            state[: len(order)] = state[torch.from_numpy(order)]
        self.pool.count_of[: len(order)] = self.pool.count_of[order]

    def _reorder_within_budget(self, plane: Tensor, layer: int, order: np.ndarray, num_tokens: np.ndarray) -> None:
        """Reorder the rows of a layer without writing what has no token."""
        rows = plane[layer]
        moved = np.flatnonzero(order != np.arange(len(order)))
        parts = [rows[order[row], :, : num_tokens[row]].clone() for row in moved]
        self._return_pages(plane, layer, moved)
        for row, part in zip(moved, parts, strict=True):
            rows[row, :, : part.size(1)] = part

    def _drop(self, rows: np.ndarray) -> None:
        """Return the memory of `rows`, if there is not enough for all."""
        if self._is_overcommitted:
            for plane in self.planes:
                for tensor in plane.owned:
                    for layer in range(len(plane.layers)):
                        self._return_pages(tensor, layer, rows)

    def _return_pages(self, plane: Tensor, layer: int, rows: np.ndarray) -> None:
        """Return the whole pages of `rows` in one layer to the system."""
        memory = self._maps[plane.data_ptr()]
        row_bytes = len(memory) // (plane.size(0) * self.num_rows)
        for row in rows:
            start = (layer * self.num_rows + int(row)) * row_bytes
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (start + row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                memory.madvise(mmap.MADV_DONTNEED, first, end - first)
