"""The KV cache on the CPU: the keys and values of a sequence in one piece."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.engines.native.cache_layout import CachedHeads
from hpcrl.rollout.engines.native.kv_cache import BlockBudget, Moves
from hpcrl.runtime.exits import InputError

NO_RESERVE = 0x4000  # MAP_NORESERVE; the module has it from Python 3.13 on


@dataclass(eq=False)
class RowCache:
    """`keys` are (layers, rows, KV heads, row_tokens, key_dim), and `values` (layers, rows, KV heads, row_tokens,
    value_dim), which may be a view of the keys. Rows are those of the running batch.

    Every row has room for the longest sequence, in virtual memory: the system provides a page when it is first written.
    `pool` keeps what is written below `num_blocks` blocks in all, and pages of rows that have left are returned.
    """

    num_layers: int
    num_blocks: int
    heads: CachedHeads
    block_size: int
    num_rows: int
    row_tokens: int
    dtype: torch.dtype

    device = torch.device("cpu")

    def __post_init__(self) -> None:
        self._is_overcommitted = self.num_rows * self.row_tokens > self.num_blocks * self.block_size
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.keys.numel() > 0

    def allocate(self) -> None:
        size = self.num_layers, self.num_rows, self.heads.groups, self.row_tokens
        self._maps: list[mmap.mmap] = []
        self.keys = self._zeros(*size, self.heads.key_dim)
        if self.heads.value_in_key:
            self.values = self.keys[..., : self.heads.value_dim]
        else:
            self.values = self._zeros(*size, self.heads.value_dim)
        self.clear()

    def _zeros(self, *size: int) -> Tensor:
        """Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN."""
        nbytes = int(np.prod(size)) * self.dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self._maps.append(mmap.mmap(-1, nbytes, flags=flags))
        except OSError as error:
            raise InputError(
                f"the system does not provide {nbytes:,} bytes of virtual memory for the KV cache ({error.strerror}); "
                "lower rollout.max_num_seqs, or shorten prompts and responses"
            ) from None
        with suppress(OSError):  # of kernels without huge pages, which take memory as a whole when a part is written
            self._maps[-1].madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8).view(self.dtype).view(size)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self.dtype)
        self._maps.clear()

    def clear(self) -> None:
        if self._is_overcommitted:
            for memory in self._maps:
                memory.madvise(mmap.MADV_DONTNEED)
        self.pool = BlockBudget(self.num_blocks, self.block_size, self.num_rows)

    def places(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray]:
        """Return where `write` stores tokens at `positions` of `rows`, int64 (n,) both: int64 (n x KV heads,), places
        of heads in a layer."""
        heads = rows[:, None] * self.heads.groups + np.arange(self.heads.groups)
        return ((heads * self.row_tokens + positions[:, None]).ravel(),)

    def write(self, layer: int, places: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> None:
        """Store `keys` (n, KV heads, key_dim) and `values` (n, KV heads, value_dim) of n tokens at `places`."""
        (places_of_heads,) = places
        self.keys[layer].flatten(0, 2).index_copy_(0, places_of_heads, keys.reshape(-1, keys.size(-1)))
        if not self.heads.value_in_key:
            self.values[layer].flatten(0, 2).index_copy_(0, places_of_heads, values.reshape(-1, values.size(-1)))

    def spans(self, row: int, num_tokens: int, at_once: int) -> list[Any]:
        """Return the parts of a row's tokens, `at_once` at most in each, for `read`."""
        firsts = range(0, num_tokens, at_once)
        return [(row, slice(first, min(first + at_once, num_tokens))) for first in firsts]

    def read(self, layer: int, span: Any) -> tuple[Tensor, Tensor]:
        """Return views of keys (KV heads, tokens, key_dim) and values (KV heads, tokens, value_dim)."""
        row, tokens = span
        return self.keys[layer, row, :, tokens], self.values[layer, row, :, tokens]

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of row `source`."""
        for plane in self._planes:
            plane[:, target, :, :num_tokens] = plane[:, source, :, :num_tokens]

    def remove(self, rows: np.ndarray, moves: Moves) -> None:
        """Free `rows`; `moves` are those of rows that take their places."""
        self.pool.release(rows)
        self._drop(rows)
        for source, target in zip(*moves, strict=True):
            self.copy_row(source, target, int(self.pool.count_of[source]) * self.block_size)
        self._drop(moves.sources)
        self.pool.renumber(*moves)

    def reorder(self, order: np.ndarray) -> None:
        """Make row `order[i]` row i, for int64 (n,), a permutation of the first n rows."""
        num_tokens = self.pool.count_of[order] * self.block_size
        for layer in range(self.num_layers):
            for plane, memory in zip(self._planes, self._maps, strict=True):
                if self._is_overcommitted:
                    self._reorder_within_budget(plane[layer], layer, memory, order, num_tokens)
                else:
                    used = plane[layer, : len(order), :, : num_tokens.max(initial=0)]
                    used.copy_(used[torch.from_numpy(order)])
        self.pool.count_of[: len(order)] = self.pool.count_of[order]

    def _reorder_within_budget(
        self, rows: Tensor, layer: int, memory: mmap.mmap, order: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """Reorder the rows of a layer without writing what has no token."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        parts = [rows[order[row], :, : num_tokens[row]].clone() for row in moved]
        self._return_pages(memory, layer, moved)
        for row, part in zip(moved, parts, strict=True):
            rows[row, :, : part.size(1)] = part

    @property
    def _planes(self) -> tuple[Tensor, ...]:
        return (self.keys,) if self.heads.value_in_key else (self.keys, self.values)

    def _drop(self, rows: np.ndarray) -> None:
        """Return the memory of `rows`, if there is not enough for all."""
        if self._is_overcommitted:
            for memory in self._maps:
                for layer in range(self.num_layers):
                    self._return_pages(memory, layer, rows)

    def _return_pages(self, memory: mmap.mmap, layer: int, rows: np.ndarray) -> None:
        """Return the whole pages of `rows` in one layer to the system."""
        row_bytes = len(memory) // (self.num_layers * self.num_rows)
        for row in rows:
            start = (layer * self.num_rows + int(row)) * row_bytes
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (start + row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                memory.madvise(mmap.MADV_DONTNEED, first, end - first)
