"""The running sequences on the device, where a decode step updates them itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.engines.native.kv_cache import Moves
from hpcrl.rollout.engines.native.scheduler import RunningBatch


class SlotColumns(NamedTuple):
    """Numbers of a sequence, int32. The step updates the first two: `last_token`, which is to be run next, and the
    number of `cached` tokens. Its response position and rotary position differ from `cached` by the next two. The last
    three select its random numbers and have the bits of uint32."""

    last_token: Tensor
    cached: Tensor
    response_shift: Tensor
    rope_shift: Tensor
    sample_index: Tensor
    key_0: Tensor
    key_1: Tensor


NUM_COLUMNS = len(SlotColumns._fields)


class DecodeState:
    """One int32 tensor `memory` on the device, of which all others are views, and the host's copy of it.

    A sequence has a slot from when it joins until it leaves, so that its numbers do not move when rows do: `slots`
    (capacity,) are those of the rows of the running batch, of which there are `num_rows` (1,). `columns` (columns,
    capacity + 1) are the sequences' numbers by slot; the last slot belongs to no sequence. `blocks` (capacity x width,)
    are their blocks in the KV cache, `width` places per slot. `trainer_step` is (1,).

    The host records its changes, and `push` copies all of it in one transfer. What a step updates is not copied back:
    there the host's copy is out of date.
    """

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.capacity, self.width = capacity, width
        sizes = 1, 1, capacity, NUM_COLUMNS * (capacity + 1), capacity * width
        self.memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.num_rows, self.trainer_step, self.slots, columns, self.blocks = self.memory.split(sizes)
        self.columns = columns.view(NUM_COLUMNS, -1)
        self._host = np.zeros(sum(sizes), np.int32)
        self._first_column, self._first_block = sum(sizes[:3]), sum(sizes[:4])
        self._changed: list[np.ndarray] = []  # places in memory
        self.clear(0)

    def clear(self, trainer_step: int) -> None:
        """Clear all sequences."""
        self._slot_of = np.zeros(self.capacity, np.int64)  # by row
        self._free = list(range(self.capacity))
        self._change(np.array([1]), np.array([trainer_step], np.uint32).view(np.int32))

    def join(self, batch: RunningBatch, row: int) -> None:
        """Give row `row` of `batch`, which was just added, a slot."""
        self._slot_of[row] = slot = self._free.pop()
        cached, position = batch.cached[row], batch.first_positions[row] + batch.num_drawn[row]
        numbers = batch.last_tokens[row], cached, position - cached, batch.rope_shifts[row], batch.sample_indices[row]
        places = self._first_column + slot + np.arange(NUM_COLUMNS) * (self.capacity + 1)
        self._host[places] = np.concatenate([numbers, batch.keys[row].view(np.int32)])
        self._changed.append(places)

    def leave(self, rows: np.ndarray, moves: Moves) -> None:
        """Free the slots of `rows`; `moves` are those of rows that take their places."""
        self._free.extend(self._slot_of[rows].tolist())
        self._slot_of[moves.targets] = self._slot_of[moves.sources]

    def grow(self, rows: np.ndarray, orders: np.ndarray, blocks: np.ndarray) -> None:
        """Append `blocks` (n,) to `rows` (n,), where they are the blocks with numbers `orders` (n,)."""
        self._change(self._first_block + self._slot_of[rows] * self.width + orders, blocks)

    def push(self, num_rows: int) -> None:
        """Bring the device up to date for a step of rows 0..num_rows-1, in one transfer; in none if nothing has
        changed."""
        self._change(np.array([0]), np.array([num_rows]))
        self._change(2 + np.arange(num_rows), self._slot_of[:num_rows])
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        if not len(places):
            return
        changes = torch.from_numpy(np.stack([places.astype(np.int32), self._host[places]]))
        if self.memory.device.type != "cpu":
            changes = changes.pin_memory().to(self.memory.device, non_blocking=True)
        self.memory.index_put_((changes[0],), changes[1])

    def _change(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set what no step updates."""
        differ = self._host[places] != values
        self._host[places] = values
        self._changed.append(places[differ])
