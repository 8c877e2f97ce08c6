"""Continuous batching: which waiting sequences join the running ones, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hpcrl.rollout.native.sequence import Sequence


class Scheduler:
    """First come, first served, within `max_num_seqs` running and `max_num_batched_tokens` of one prefill call.

    A prefill call is padded to its longest prompt, and padding counts: it is the memory that this limit is for. A
    prompt longer than the limit is prefilled alone.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._num_running = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._num_running > 0

    def schedule(self) -> list[Sequence]:
        """The sequences to prefill now; none: decode the running ones."""
        admitted: list[Sequence] = []
        longest = 0
        while self._can_admit(len(admitted), longest):
            admitted.append(self._admit())
            longest = max(longest, admitted[-1].prompt_length)
        return admitted

    def _can_admit(self, num_admitted: int, longest: int) -> bool:
        if not self._waiting or self._num_running == self._max_num_seqs:
            return False
        longest = max(longest, self._waiting[0].prompt_length)
        return num_admitted == 0 or (num_admitted + 1) * longest <= self._max_num_batched_tokens

    def _admit(self) -> Sequence:
        self._num_running += 1
        return self._waiting.popleft()

    def finish(self, num_sequences: int) -> None:
        self._num_running -= num_sequences
