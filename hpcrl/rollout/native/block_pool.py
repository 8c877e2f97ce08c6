"""Which sequence has which block of the KV cache: numbers only, no tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FREE = -1


class Moves(NamedTuple):
    """Blocks whose content must be copied from `sources` to `targets`, int64 (n,) each."""

    sources: np.ndarray
    targets: np.ndarray


class BlockPool:
    """Blocks of `block_size` tokens, given to the rows of the running batch.

    The blocks in use are nearly dense, 0..`extent`-1 with few holes, so that attention on the CPU reads one slice and
    gathers nothing. All int64: `row_of` (blocks,) is the row that has a block, or FREE; `order_of` (blocks,) says which
    part of the row's tokens it holds; `tail_of` (rows,) is a row's last block, `count_of` (rows,) how many it has.
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
        """How many blocks each of `rows` lacks to hold `num_tokens`, int64 (n,) both."""
        return np.maximum(-(-num_tokens // self.block_size) - self.count_of[rows], 0)

    def grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Gives each of `rows` what it lacks to hold `num_tokens`: the new blocks, int64 (n,)."""
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
            raise RuntimeError(f"{count} blocks of the KV cache are wanted and {self.num_free} are free")
        holes = np.flatnonzero(self.row_of[: self.extent] == FREE)[:count]
        behind = np.arange(self.extent, self.extent + count - len(holes))
        self.extent += len(behind)
        self.num_free -= count
        return np.concatenate([holes, behind])

    def blocks_of(self, row: int) -> np.ndarray:
        """The blocks of `row` in the order of its tokens, int64 (n,)."""
        blocks = np.flatnonzero(self.row_of[: self.extent] == row)
        return blocks[self.order_of[blocks].argsort()]

    def table(self, rows: np.ndarray) -> np.ndarray:
        """The blocks of `rows` in the order of their tokens, int64 (n, most blocks of a row); 0 behind a row's last."""
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
        """Rows `sources` are from now on rows `targets`, which have no blocks."""
        new_row = np.arange(-1, len(self.tail_of))  # by old row + 1, as FREE is -1
        new_row[sources + 1] = targets
        self.row_of[: self.extent] = new_row[self.row_of[: self.extent] + 1]
        self.tail_of[targets] = self.tail_of[sources]
        self.count_of[targets] = self.count_of[sources]
        self.count_of[sources] = 0

    def compact(self) -> Moves:
        """Brings the last blocks in use into the holes."""
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
