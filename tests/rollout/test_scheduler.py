"""Admission: in order, within the rows, the blocks and the tokens of a call, and never stuck."""

from __future__ import annotations

import numpy as np

from hpcrl.rollout.engines.native.scheduler import Admission, Scheduler, Sequence

PLENTY = 10**6


def make_sequences(*lengths: int, groups: tuple[int, ...] | None = None) -> list[Sequence]:
    """Sequences with `lengths` tokens to cache before they decode."""
    key = np.zeros(2, dtype=np.uint32)
    groups = groups or tuple(range(len(lengths)))
    return [
        Sequence(index, np.zeros(n + 1, dtype=np.int32), key, 0, 0, 4, group)
        for index, (n, group) in enumerate(zip(lengths, groups, strict=True))
    ]


def make_scheduler(*sequences: Sequence, max_num_seqs: int = 10, max_num_batched_tokens: int = 100) -> Scheduler:
    scheduler = Scheduler(max_num_seqs, max_num_batched_tokens, block_size=4)
    scheduler.waiting.extend(sequences)
    return scheduler


def indices(sequences: list[Sequence]) -> list[int]:
    return [sequence.index for sequence in sequences]


def split(admission: Admission) -> tuple[list[int], list[int]]:
    return indices(admission.prefilled), indices(admission.joined)


def test_rows_are_refilled_as_sequences_end() -> None:
    scheduler = make_scheduler(*make_sequences(1, 1, 1), max_num_seqs=2)
    assert split(scheduler.schedule(set(), 0, PLENTY)) == ([0, 1], [])
    assert split(scheduler.schedule({0, 1}, 2, PLENTY)) == ([], [])
    assert split(scheduler.schedule({1}, 1, PLENTY)) == ([2], [])
    assert not scheduler.waiting


def test_padding_counts_as_prefill_tokens_and_who_is_above_the_limit_goes_alone() -> None:
    scheduler = make_scheduler(*make_sequences(2, 2, 4, 5, 1, 90), max_num_batched_tokens=12)
    assert split(scheduler.schedule(set(), 0, PLENTY)) == ([0, 1, 2], [])
    assert split(scheduler.schedule(set(), 3, PLENTY)) == ([3, 4], [])
    assert split(scheduler.schedule(set(), 5, PLENTY)) == ([5], [])


def test_a_context_is_prefilled_once_for_its_group() -> None:
    scheduler = make_scheduler(*make_sequences(9, 9, 9, 3, 9, groups=(7, 7, 7, 8, 7)), max_num_seqs=4)
    assert split(scheduler.schedule(set(), 0, PLENTY)) == ([0, 3], [1, 2])
    assert split(scheduler.schedule({7, 8}, 3, PLENTY)) == ([], [4])
    assert split(make_scheduler(*make_sequences(9, groups=(7,))).schedule({8}, 1, PLENTY)) == ([0], [])


def test_one_token_needs_no_prefill() -> None:
    assert split(make_scheduler(*make_sequences(0, 5)).schedule(set(), 0, PLENTY)) == ([1], [0])


def test_sequences_wait_for_blocks_and_leave_one_to_each_that_runs() -> None:
    sequences = make_sequences(7, 7, 7)  # two blocks each, with the token to draw
    assert split(make_scheduler(*sequences).schedule(set(), 0, 2)) == ([0], [])
    assert split(make_scheduler(*sequences).schedule(set(), 0, 4)) == ([0], [])
    assert split(make_scheduler(*sequences).schedule(set(), 0, 5)) == ([0, 1], [])
    assert split(make_scheduler(*sequences).schedule(set(), 5, 6)) == ([], [])
    assert split(make_scheduler(*sequences).schedule(set(), 5, 7)) == ([0], [])


def test_preempted_sequences_come_first_in_their_order() -> None:
    scheduler = make_scheduler(*make_sequences(1, 1, 1))
    others = make_sequences(1, 1)
    scheduler.put_back(others)
    assert list(scheduler.waiting)[:2] == others


def test_kept_tokens_are_not_prefilled_but_take_blocks() -> None:
    sequences = make_sequences(90, 90, 9, groups=(7, 7, 8))
    for sequence, kept in zip(sequences, (85, 84, 0), strict=True):
        sequence.num_kept = kept
    # Equal contexts do not join either: each has a cache of its own.
    assert split(make_scheduler(*sequences, max_num_batched_tokens=27).schedule(set(), 0, PLENTY)) == ([0, 1, 2], [])
    assert split(make_scheduler(*sequences, max_num_batched_tokens=26).schedule(set(), 0, PLENTY)) == ([0, 1], [])
    assert split(make_scheduler(*sequences).schedule({7}, 1, 2 * 23 + 2)) == ([0, 1], [])
    assert split(make_scheduler(*sequences).schedule({7}, 1, 2 * 23 + 1)) == ([0], [])
