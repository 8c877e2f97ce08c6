"""Sequences on their way through the engine, and continuous batching: which of them run, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hpcrl.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from hpcrl.rollout.sampling import request_key


@dataclass(eq=False)
class Sequence:
    """`index` is its place among the requests; `context_ids` int32 (n,) are prompt and prefix.

    `key` is its Philox key (2,) uint32, `first_position` the place in the response of the first token to draw. `group`
    is the index of the first sequence of equal context that is known. `drawn` are its tokens up to when it last left
    the running batch, or a little earlier, in parts: ids int32 (n,) and log-probs fp32 (n,). `routed` are the experts
    of the tokens run by then, int16 (n, layers x topk), also in parts; the first is of the context but its last token.
    """

    index: int
    context_ids: np.ndarray
    key: np.ndarray
    sample_index: int
    first_position: int
    max_new_tokens: int
    group: int
    drawn: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def from_request(cls, index: int, request: Request, sampling: SamplingParams, seed: int) -> Sequence:
        context_ids = np.concatenate([request.prompt_ids, request.prefix_ids]).astype(np.int32)
        first = len(request.prefix_ids)
        limit = sampling.max_new_tokens - first if request.max_new_tokens is None else request.max_new_tokens
        return cls(index, context_ids, request_key(seed, request.uid), request.sample_index, first, limit, index)

    @property
    def num_drawn(self) -> int:
        return sum(len(ids) for ids, _ in self.drawn)

    @property
    def num_to_cache(self) -> int:
        """Tokens that must be in the KV cache before it decodes: all but the last, which decoding starts from."""
        return len(self.context_ids) + self.num_drawn - 1

    def token_ids(self) -> np.ndarray:
        """Context and what was drawn, int32 (n,)."""
        return np.concatenate([self.context_ids, *(ids for ids, _ in self.drawn)])

    def completion(self, reason: FinishReason) -> Completion:
        """What was drawn, which leaves the sequence: it would be held twice."""
        ids, log_probs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        for part in self.drawn:
            ids.append(part[0])
            log_probs.append(part[1])
        routed = np.concatenate(self.routed) if self.routed else None
        self.drawn, self.routed = [], []
        return Completion(np.concatenate(ids), np.concatenate(log_probs), reason, routed)


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
