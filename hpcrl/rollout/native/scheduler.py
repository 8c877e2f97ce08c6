"""Continuous batching: which waiting sequences join the running ones, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcrl.rollout.native.sequence import Sequence


@dataclass
class Admission:
    """`prefilled` go through one call of the decoder; `joined` then take their context from one of equal context that
    runs, or have a context of one token, which needs nothing in the cache."""

    prefilled: list[Sequence] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prefilled) + len(self.joined)


class Scheduler:
    """First come, first served; preempted sequences come before those that have not started.

    At most `max_num_seqs` run. A prefill call is padded to its longest sequence, and padding counts towards
    `max_num_batched_tokens`: it is the memory that this limit is for. A longer sequence is prefilled alone. Whoever
    joins leaves a free block to each running sequence, so that it is not preempted at once.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._waiting: deque[Sequence] = deque()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Preempted, the one that started first in front."""
        self._waiting.extendleft(reversed(list(sequences)))

    def take_all(self) -> list[Sequence]:
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def schedule(self, running_groups: set[int], num_running: int, num_free_blocks: int) -> Admission:
        """Whoever can join now, next to `num_running` sequences, the contexts of which are `running_groups`."""
        admission, groups, longest = Admission(), set(running_groups), 0
        while self._waiting and num_running < self._max_num_seqs:
            sequence = self._waiting[0]
            tokens = sequence.num_to_cache
            num_free_blocks -= tokens // self._block_size + 1
            if num_free_blocks < (num_running if num_running else 0):
                break
            if tokens == 0 or (not sequence.drawn and sequence.group in groups):
                admission.joined.append(sequence)
            else:
                longest = max(longest, tokens)
                calls = len(admission.prefilled) + 1
                if calls > 1 and calls * longest > self._max_num_batched_tokens:
                    break
                admission.prefilled.append(sequence)
                groups.add(sequence.group)
            self._waiting.popleft()
            num_running += 1
        return admission
