"""The cache across the turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcrl.rollout.engines.native.kv_cache import KVCache, Moves
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.engines.native.scheduler import Sequence


@dataclass(eq=False)
class KeptPrefix:
    """What `row` of the cache has of `token_ids` int32 (n,), with the keys of their pictures and the records of their
    experts, as in `Sequence`. `successor` is the waiting sequence that starts with it."""

    row: int
    token_ids: np.ndarray
    picture_keys: list[int]
    routed: list[np.ndarray]
    successor: Sequence | None = None

    def begins(self, sequence: Sequence) -> bool:
        """Whether the context of `sequence` starts with these tokens and pictures, and has more tokens to cache."""
        count = len(self.token_ids)
        if count >= sequence.num_to_cache or not np.array_equal(sequence.context_ids[:count], self.token_ids):
            return False
        return _keys_before(count, sequence) == self.picture_keys


def _keys_before(count: int, sequence: Sequence) -> list[int]:
    """Return the keys of the pictures in the first `count` tokens."""
    return [picture.key for picture in sequence.pictures if picture.place.start < count]


class KeptPrefixes:
    """Caches of sequences that have ended, one for each trajectory, for the next turns of their conversations.

    They stay in rows of the cache that no sequence runs in, and give way to running sequences, which need their rows or
    their blocks: the least recently used first.
    """

    def __init__(self, cache: KVCache | RowCache) -> None:
        self._cache = cache
        self._of: dict[tuple[str, int], KeptPrefix] = {}  # by trajectory, the least recently used first

    def keep(self, sequence: Sequence, row: int, count: int) -> None:
        """Keep the first `count` tokens of a sequence that has ended, which `row` has, in place of what its trajectory
        has kept before."""
        self._drop(sequence.trajectory)
        ids, keys = sequence.token_ids()[:count], _keys_before(count, sequence)
        self._of[sequence.trajectory] = KeptPrefix(row, ids, keys, sequence.routed)

    def reserve(self, sequence: Sequence) -> None:
        """Find what a new sequence starts with, and set its `num_kept`. What does not fit its context is dropped."""
        kept = self._of.get(sequence.trajectory)
        if kept is None or kept.successor is not None:
            return
        if kept.begins(sequence):
            kept.successor, sequence.num_kept = sequence, len(kept.token_ids)
            self._of[sequence.trajectory] = self._of.pop(sequence.trajectory)
        else:
            self._drop(sequence.trajectory)

    def take(self, sequence: Sequence, row: int) -> None:
        """Move what `sequence` starts with to `row`, where it runs now."""
        kept = self._of.pop(sequence.trajectory)
        assert kept.successor is sequence
        sequence.num_kept, sequence.routed = 0, list(kept.routed)
        self._move(kept, row)

    def leave(self, row: int) -> None:
        """Leave `row` to a sequence without a kept prefix."""
        if len(self._of) == self._cache.num_rows - row:
            self._drop(next(iter(self._of)))
        in_row = self._in(row)
        if in_row is not None:
            taken = {kept.row for kept in self._of.values()}
            self._move(in_row, max(set(range(row, self._cache.num_rows)) - taken))

    def evict(self, num_blocks: int) -> None:
        """Evict prefixes until `num_blocks` blocks are free, or none is left."""
        while self._of and self._cache.pool.num_free < num_blocks:
            self._drop(next(iter(self._of)))

    def _in(self, row: int) -> KeptPrefix | None:
        return next((kept for kept in self._of.values() if kept.row == row), None)

    def _move(self, kept: KeptPrefix, row: int) -> None:
        """Move a prefix to `row`, in exchange for what another one has there."""
        other, source = self._in(row), kept.row
        if source != row:
            self._cache.exchange(Moves(np.array([source]), np.array([row])))
            kept.row = row
            if other is not None:
                other.row = source

    def _drop(self, trajectory: tuple[str, int]) -> None:
        """Free what a trajectory has kept, if it has. The sequence that waits for it is prefilled as a whole."""
        kept = self._of.pop(trajectory, None)
        if kept is not None:
            self._cache.free(np.array([kept.row]))
            if kept.successor is not None:
                kept.successor.num_kept = 0
