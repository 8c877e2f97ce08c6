"""The running sequences as arrays, one row each, so that a decode step does no Python work per sequence."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.native.kv_cache import Moves
from hpcrl.rollout.native.scheduler import Sequence
from hpcrl.rollout.protocol import SamplingParams

PART = 64  # tokens of a row that wait in its buffer, until they go to its sequence


class RunningBatch:
    """Rows 0..num_rows-1 are running.

    Per row: `cached` tokens in the KV cache, `num_drawn` tokens (the last one is not cached yet), and what the random
    numbers are keyed by. Nothing here has the size of the longest response: what was drawn leaves in parts.
    `routing_width` numbers tell a token's experts, in all layers; 0: they are not recorded.
    """

    def __init__(self, capacity: int, sampling: SamplingParams, routing_width: int = 0) -> None:
        self.num_rows = 0
        self.keys = np.zeros((capacity, 2), np.uint32)
        self.sample_indices = np.zeros(capacity, np.int64)
        self.first_positions = np.zeros(capacity, np.int64)
        self.num_drawn = np.zeros(capacity, np.int64)
        self.cached = np.zeros(capacity, np.int64)
        self.last_tokens = np.zeros(capacity, np.int64)
        self.groups = np.zeros(capacity, np.int64)
        self.sequences = np.empty(capacity, object)
        self._limits = np.zeros(capacity, np.int64)
        self._in_part = np.zeros(capacity, np.int64)
        self._part_ids = np.zeros((capacity, PART), np.int32)
        self._part_log_probs = np.zeros((capacity, PART), np.float32)
        self._part_experts = np.zeros((capacity, PART, routing_width), np.int16)
        self._started = np.zeros(capacity, np.int64)
        self._stop_ids = np.array(() if sampling.ignore_eos else sampling.eos_token_ids, np.int64)
        self._num_started = 0

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    @property
    def positions(self) -> np.ndarray:
        """Of the next token of each row in its response, int64 (rows,)."""
        return self.first_positions[self.rows] + self.num_drawn[self.rows]

    def row_of_group(self, group: int) -> int | None:
        """A running row with this context."""
        found = np.flatnonzero(self.groups[self.rows] == group)
        return int(found[0]) if len(found) else None

    def add(self, sequence: Sequence) -> int:
        """A new row for `sequence`, whose tokens but the last are about to be cached."""
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
        self._limits[row] = sequence.max_new_tokens
        self._in_part[row] = 0
        self._started[row] = self._num_started
        self._num_started += 1
        return row

    def append(self, token_ids: np.ndarray, log_probs: np.ndarray, experts: np.ndarray) -> None:
        """One more token of each row: ids and log-probs (rows,). What was the last token is cached now, and went to
        `experts` (rows, routing width)."""
        rows = self.rows
        places = np.arange(self.num_rows), self._in_part[rows]
        self._part_ids[places] = token_ids
        self._part_log_probs[places] = log_probs
        self._part_experts[places] = experts
        self.last_tokens[rows] = token_ids
        self.cached[rows] += 1
        self.num_drawn[rows] += 1
        self._in_part[rows] += 1
        self._give(np.flatnonzero(self._in_part[rows] == PART))

    def _give(self, rows: np.ndarray) -> None:
        """What `rows` have in their buffers goes to their sequences."""
        for row in rows:
            length = self._in_part[row]
            if length:
                part = self._part_ids[row, :length].copy(), self._part_log_probs[row, :length].copy()
                self.sequences[row].drawn.append(part)
                if self._part_experts.shape[2]:
                    self.sequences[row].routed.append(self._part_experts[row, :length].copy())
        self._in_part[rows] = 0

    def stopped(self) -> np.ndarray:
        """Which rows have drawn an end-of-sequence token, bool (rows,)."""
        return np.isin(self.last_tokens[self.rows], self._stop_ids)

    def at_limit(self) -> np.ndarray:
        """Which rows have drawn all that they may, bool (rows,)."""
        return self.num_drawn[self.rows] == self._limits[self.rows]

    def latest_first(self) -> np.ndarray:
        """The rows, those that joined last in front, int64 (rows,)."""
        return np.argsort(-self._started[self.rows])

    def remove(self, rows: np.ndarray) -> tuple[list[Sequence], Moves]:
        """Takes `rows` out and fills their places with the last ones: their sequences, and which rows moved where."""
        self._give(rows)
        sequences = list(self.sequences[rows])
        left = self.num_rows - len(rows)
        stays = np.ones(self.num_rows, bool)
        stays[rows] = False
        moves = Moves(left + np.flatnonzero(stays[left:]), np.flatnonzero(~stays[:left]))
        for column in (
            self.keys,
            self.sample_indices,
            self.first_positions,
            self.num_drawn,
            self.cached,
            self.last_tokens,
            self.groups,
            self.sequences,
            self._limits,
            self._in_part,
            self._part_ids,
            self._part_log_probs,
            self._part_experts,
            self._started,
        ):
            column[moves.targets] = column[moves.sources]
        self.sequences[left : self.num_rows] = None
        self.num_rows = left
        return sequences, moves
