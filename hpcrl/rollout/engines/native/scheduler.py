"""Sequences, continuous batching, and the running sequences as arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hpcrl.model.blocks.rope_angles import rope_positions
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.native.kv_cache import Moves
from hpcrl.rollout.protocol import Completion, FinishReason, Prefill, PromptPicture, SamplingParams
from hpcrl.rollout.sampling import uniforms


@dataclass(eq=False)
class Sequence:
    """`index` is its place among the requests; `context_ids` int32 (n,) are prompt and prefix.

    `key` is its Philox key (2,) uint32, `first_position` the place in the response of the first token to draw. `group`
    is the index of the first known sequence of equal context. `drawn` are its tokens up to when it last left the
    running batch, or a little earlier, in parts: ids int32 (n,) and log-probs fp32 (n,). `routed` are the experts of
    the tokens run by then, int16 (n, layers x topk), also in parts; the first part is the context without its last
    token. While it waits, `num_kept` tokens of its context are in a kept prefix.
    """

    index: int
    context_ids: np.ndarray
    key: np.ndarray
    sample_index: int
    first_position: int
    max_new_tokens: int
    group: int
    pictures: tuple[PromptPicture, ...] = ()
    uid: str = ""
    num_kept: int = 0
    prefill: Prefill = Prefill()
    drawn: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)

    @property
    def trajectory(self) -> tuple[str, int]:
        """What the turns of a conversation have in common."""
        return self.uid, self.sample_index

    @property
    def num_drawn(self) -> int:
        return sum(len(ids) for ids, _ in self.drawn)

    @property
    def num_to_cache(self) -> int:
        """Tokens that must be in the KV cache before it decodes: all but the last, which decoding starts from."""
        return len(self.context_ids) + self.num_drawn - 1

    def token_ids(self) -> np.ndarray:
        """Return context and drawn tokens, int32 (n,)."""
        return np.concatenate([self.context_ids, *(ids for ids, _ in self.drawn)])

    def rope_positions(self, vision: Vision) -> np.ndarray:
        """Return positions in time, height and width of context and drawn tokens, int64 (3, n)."""
        return rope_positions(self.num_to_cache + 1, [picture.place for picture in self.pictures], vision)

    def completion(self, reason: FinishReason) -> Completion:
        """Return the drawn tokens, and clear them here so that they are not held twice."""
        ids, log_probs = zip((np.zeros(0, np.int32), np.zeros(0, np.float32)), *self.drawn, strict=True)
        routed = np.concatenate(self.routed) if self.routed else None
        self.drawn, self.routed = [], []
        return Completion(np.concatenate(ids), np.concatenate(log_probs), reason, routed, self.prefill)


@dataclass
class Admission:
    """`prefilled` go through one call of the decoder. `joined` then copy the cache of a running sequence of equal
    context, or have a context of one token, which needs nothing in the cache."""

    prefilled: list[Sequence] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served; preempted sequences, and turns whose prefix is kept, come before the others.

    At most `max_num_seqs` run. A prefill call is padded to its longest sequence, and padding counts towards
    `max_num_batched_tokens`, because it takes memory. A longer sequence is prefilled by itself. An admission leaves one
    free block per running sequence, so that it does not cause a preemption at once.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self.waiting: deque[Sequence] = deque()

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences that have started, or whose conversation has, at the front, in their order."""
        self.waiting.extendleft(reversed(list(sequences)))

    def can_admit(self, num_running: int, num_free_blocks: int) -> bool:
        """Whether `schedule` returns a sequence."""
        if not self.waiting or num_running >= self._max_num_seqs:
            return False
        return num_free_blocks - self._num_blocks(self.waiting[0]) >= num_running

    def _num_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks `sequence` needs to join."""
        return sequence.num_to_cache // self._block_size + 1

    def schedule(self, running_groups: set[int], num_running: int, num_free_blocks: int) -> Admission:
        """Return the sequences that can join `num_running` sequences with contexts `running_groups`.

        Args:
            num_free_blocks: blocks that no running sequence has, those of kept prefixes included.
        """
        admission, groups, longest = Admission(), set(running_groups), 0
        while self.waiting and num_running < self._max_num_seqs:
            sequence = self.waiting[0]
            tokens = sequence.num_to_cache - sequence.num_kept
            num_free_blocks -= self._num_blocks(sequence)
            if num_free_blocks < num_running:
                break
            has_equal = not sequence.drawn and not sequence.num_kept and sequence.group in groups
            if tokens == 0 or has_equal:
                admission.joined.append(sequence)
            else:
                longest = max(longest, tokens)
                calls = len(admission.prefilled) + 1
                if calls > 1 and calls * longest > self._max_num_batched_tokens:
                    break
                admission.prefilled.append(sequence)
                groups.add(sequence.group)
            self.waiting.popleft()
            num_running += 1
        return admission


FLUSH_TOKENS = 64  # tokens of a row in its buffer, before they are appended to its sequence
MOST_AHEAD = 16  # tokens whose random numbers are drawn at once; this takes about as long as for one


class RunningBatch:
    """The running sequences as arrays with one row each, so that a decode step does no Python work per sequence.

    Rows 0..num_rows-1 are running. Per row: `cached` tokens in the KV cache, `num_drawn` tokens (the last one is not
    cached yet), the keys of the random numbers, and what the rotary embedding's position of the next token differs by
    from its place. No array has the size of the longest response: drawn tokens are flushed in parts. `routing_width`
    numbers record a token's experts, in all layers; 0: they are not recorded.
    """

    def __init__(self, capacity: int, sampling: SamplingParams, routing_width: int = 0) -> None:
        self.num_rows = 0
        self.keys = np.zeros((capacity, 2), np.uint32)
        self._numbers = np.zeros((10, capacity), np.int64)
        self.sample_indices, self.first_positions, self.num_drawn, self.cached, self.last_tokens = self._numbers[:5]
        self.groups, self.rope_shifts, self._limits, self._in_part, self._started = self._numbers[5:]
        self.sequences = np.empty(capacity, object)
        self._part_ids = np.zeros((capacity, FLUSH_TOKENS), np.int32)
        self._part_log_probs = np.zeros((capacity, FLUSH_TOKENS), np.float32)
        self._part_experts = np.zeros((capacity, FLUSH_TOKENS, routing_width), np.int16)
        self._uniforms = np.zeros((capacity, MOST_AHEAD))
        self._num_ahead = self._next_ahead = 0  # tokens that the batch has numbers for, and the next one's place
        self._stop_ids = np.array(() if sampling.ignore_eos else sampling.eos_token_ids, np.int64)
        self._num_started = 0

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    def uniforms(self, trainer_step: int) -> np.ndarray:
        """Return the random numbers of the next token of each row, as `hpcrl.rollout.sampling.uniforms`.

        They are drawn for 1, 2, 4 and so on tokens ahead, until a row joins.
        """
        rows = self.rows
        if self._next_ahead == self._num_ahead:
            self._num_ahead, self._next_ahead = min(max(1, 2 * self._num_ahead), MOST_AHEAD), 0
            following = self.first_positions[rows] + self.num_drawn[rows]  # in the response
            positions = following[:, None] + np.arange(self._num_ahead)
            of_row = self.keys[rows], self.sample_indices[rows]
            keys, sample_indices = (part.repeat(self._num_ahead, 0) for part in of_row)
            drawn = uniforms(keys, positions.ravel(), sample_indices, trainer_step)
            self._uniforms[rows, : self._num_ahead] = drawn.reshape(positions.shape)
        self._next_ahead += 1
        return self._uniforms[rows, self._next_ahead - 1]

    def row_of_group(self, group: int) -> int | None:
        """Return a running row with this context."""
        found = np.flatnonzero(self.groups[self.rows] == group)
        return int(found[0]) if len(found) else None

    def add(self, sequence: Sequence, rope_shift: int = 0) -> int:
        """Add a row for `sequence`; its tokens but the last are about to be cached."""
        row = self.num_rows
        self.num_rows += 1
        self.sequences[row] = sequence
        self.keys[row] = sequence.key
        self.sample_indices[row] = sequence.sample_index
        self.first_positions[row] = sequence.first_position
        self.num_drawn[row] = sequence.num_drawn
        self.cached[row] = sequence.num_to_cache
        self.last_tokens[row] = (sequence.drawn[-1][0] if sequence.drawn else sequence.context_ids)[-1]
        self.groups[row] = sequence.group
        self.rope_shifts[row] = rope_shift
        self._limits[row] = sequence.max_new_tokens
        self._in_part[row] = 0
        self._started[row] = self._num_started
        self._num_started += 1
        self._num_ahead = self._next_ahead = 0
        return row

    def append(self, token_ids: np.ndarray, log_probs: np.ndarray, experts: np.ndarray) -> None:
        """Append one token to each row: ids and log-probs (rows,). The former last token is cached now, and `experts`
        (rows, routing width) are its experts."""
        rows = self.rows
        places = np.arange(self.num_rows), self._in_part[rows]
        self._part_ids[places] = token_ids
        self._part_log_probs[places] = log_probs
        self._part_experts[places] = experts
        self.last_tokens[rows] = token_ids
        self.cached[rows] += 1
        self.num_drawn[rows] += 1
        self._in_part[rows] += 1
        self._flush(np.flatnonzero(self._in_part[rows] == FLUSH_TOKENS))

    def _flush(self, rows: np.ndarray) -> None:
        """Append the buffered tokens of `rows` to their sequences."""
        for row in rows:
            length = self._in_part[row]
            if length:
                part = self._part_ids[row, :length].copy(), self._part_log_probs[row, :length].copy()
                self.sequences[row].drawn.append(part)
                if self._part_experts.shape[2]:
                    self.sequences[row].routed.append(self._part_experts[row, :length].copy())
        self._in_part[rows] = 0

    def stopped(self) -> np.ndarray:
        """Return which rows have drawn an end-of-sequence token, bool (rows,)."""
        return np.isin(self.last_tokens[self.rows], self._stop_ids)

    def at_limit(self, num_ahead: int = 0) -> np.ndarray:
        """Return which rows have drawn all their tokens after `num_ahead` more, bool (rows,)."""
        return self.num_drawn[self.rows] + num_ahead == self._limits[self.rows]

    def latest_first(self) -> np.ndarray:
        """Return the rows, latest to join first, int64 (rows,)."""
        return np.argsort(-self._started[self.rows])

    def remove(self, rows: np.ndarray) -> tuple[list[Sequence], Moves]:
        """Remove `rows` and fill their places with the last ones. Return their sequences, and the moved rows."""
        self._flush(rows)
        sequences = list(self.sequences[rows])
        num_left = self.num_rows - len(rows)
        stays = np.ones(self.num_rows, bool)
        stays[rows] = False
        moves = Moves(num_left + np.flatnonzero(stays[num_left:]), np.flatnonzero(~stays[:num_left]))
        for column in self._columns:
            column[moves.targets] = column[moves.sources]
        self.sequences[num_left : self.num_rows] = None
        self.num_rows = num_left
        return sequences, moves

    def reorder(self, order: np.ndarray) -> None:
        """Make row `order[i]` row i, int64 (rows,)."""
        for column in self._columns:
            column[self.rows] = column[order]

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        """All arrays, with a row of the batch as their first index."""
        parts = self._part_ids, self._part_log_probs, self._part_experts
        return self.keys, self._numbers.T, self._uniforms, self.sequences, *parts
