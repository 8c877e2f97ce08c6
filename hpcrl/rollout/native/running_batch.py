"""The running sequences as arrays, one row each, so that a decode step does no Python work per sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpcrl.rollout.native.sequence import Sequence
from hpcrl.rollout.protocol import Completion, SamplingParams


class Vacancy(NamedTuple):
    """Rows `sources` now stand at `targets`, int64 (n,) each, and have up to `length` cached tokens."""

    sources: np.ndarray
    targets: np.ndarray
    length: int


class RunningBatch:
    """Rows 0..num_rows-1 are running; row i has slot i of the KV cache.

    Per row: `cached` tokens in the KV cache, `num_new` tokens drawn (the last one is not cached yet), and what the
    random numbers are keyed by.
    """

    def __init__(self, capacity: int, sampling: SamplingParams) -> None:
        self.num_rows = 0
        self.keys = np.zeros((capacity, 2), dtype=np.uint32)
        self.sample_indices = np.zeros(capacity, dtype=np.int64)
        self.num_new = np.zeros(capacity, dtype=np.int64)
        self.cached = np.zeros(capacity, dtype=np.int64)
        self.last_tokens = np.zeros(capacity, dtype=np.int64)
        self._limits = np.zeros(capacity, dtype=np.int64)
        self._sequences = np.empty(capacity, dtype=object)
        self._token_ids = np.zeros((capacity, sampling.max_new_tokens), dtype=np.int32)
        self._log_probs = np.zeros((capacity, sampling.max_new_tokens), dtype=np.float32)
        self._stop_ids = np.array(() if sampling.ignore_eos else sampling.eos_token_ids, dtype=np.int64)

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    def add(self, sequences: list[Sequence]) -> slice:
        """New rows for `sequences`, whose prompts are about to be cached."""
        rows = slice(self.num_rows, self.num_rows + len(sequences))
        self.num_rows = rows.stop
        self._sequences[rows] = sequences
        self.keys[rows] = [sequence.key for sequence in sequences]
        self.sample_indices[rows] = [sequence.sample_index for sequence in sequences]
        self.cached[rows] = [sequence.prompt_length for sequence in sequences]
        self.num_new[rows] = 0
        self._limits[rows] = [sequence.max_new_tokens for sequence in sequences]
        return rows

    def append(self, rows: slice, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """One more token of each of `rows`: ids and log-probs (rows,)."""
        places = np.arange(rows.start, rows.stop), self.num_new[rows]
        self._token_ids[places] = token_ids
        self._log_probs[places] = log_probs
        self.last_tokens[rows] = token_ids
        self.num_new[rows] += 1

    def finished(self) -> np.ndarray:
        """Rows that have drawn an end-of-sequence token or all that they may, int64 (n,)."""
        rows = self.rows
        return np.flatnonzero(self._stopped(rows) | (self.num_new[rows] == self._limits[rows]))

    def completions(self, rows: np.ndarray) -> dict[int, Completion]:
        """The responses of `rows` by the index of their request."""
        return {
            self._sequences[row].index: Completion(
                self._token_ids[row, : self.num_new[row]].copy(),
                self._log_probs[row, : self.num_new[row]].copy(),
                "stop" if stopped else "length",
            )
            for row, stopped in zip(rows, self._stopped(rows), strict=True)
        }

    def remove(self, rows: np.ndarray) -> Vacancy:
        """Takes `rows` out and fills their places with the last ones, whose cache must move alike."""
        left = self.num_rows - len(rows)
        stays = np.ones(self.num_rows, dtype=bool)
        stays[rows] = False
        sources, targets = left + np.flatnonzero(stays[left:]), np.flatnonzero(~stays[:left])
        for column in (
            self._sequences,
            self.keys,
            self.sample_indices,
            self.num_new,
            self.cached,
            self.last_tokens,
            self._limits,
            self._token_ids,
            self._log_probs,
        ):
            column[targets] = column[sources]
        self.num_rows = left
        return Vacancy(sources, targets, int(self.cached[targets].max(initial=0)))

    def _stopped(self, rows: slice | np.ndarray) -> np.ndarray:
        return np.isin(self.last_tokens[rows], self._stop_ids)
