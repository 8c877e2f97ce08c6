"""Admission: in order, within the slots and the tokens of a call, and never stuck."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.native.scheduler import Scheduler
from hpcrl.rollout.native.sequence import Sequence


def make_sequences(*lengths: int) -> list[Sequence]:
    key = np.zeros(2, dtype=np.uint32)
    return [Sequence(index, np.zeros(n, dtype=np.int64), key, 0, 4) for index, n in enumerate(lengths)]


def indices(sequences: list[Sequence]) -> list[int]:
    return [sequence.index for sequence in sequences]


def test_slots_are_refilled_as_sequences_end() -> None:
    scheduler = Scheduler(max_num_seqs=2, max_num_batched_tokens=100)
    scheduler.add(make_sequences(1, 1, 1))
    assert indices(scheduler.schedule()) == [0, 1]
    assert scheduler.schedule() == []
    scheduler.finish(1)
    assert indices(scheduler.schedule()) == [2]
    assert scheduler.has_work
    scheduler.finish(2)
    assert not scheduler.has_work


def test_padding_counts_as_prefill_tokens() -> None:
    scheduler = Scheduler(max_num_seqs=10, max_num_batched_tokens=12)
    scheduler.add(make_sequences(2, 2, 4, 5, 1))
    assert indices(scheduler.schedule()) == [0, 1, 2]
    assert indices(scheduler.schedule()) == [3, 4]


def test_a_prompt_above_the_limit_goes_alone() -> None:
    scheduler = Scheduler(max_num_seqs=10, max_num_batched_tokens=4)
    scheduler.add(make_sequences(9, 1))
    assert indices(scheduler.schedule()) == [0]
    assert indices(scheduler.schedule()) == [1]
