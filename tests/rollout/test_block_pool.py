"""Blocks are given and taken back; at every moment each row has just the blocks that its tokens need."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.engines.native.kv_cache import FREE, BlockPool, Moves

SIZE = 4


def check(pool: BlockPool, lengths: list[int], content: np.ndarray, names: list[int]) -> None:
    """`content` (blocks, 2) is what a cache would hold: whose block it is, and which of its blocks."""
    used = np.flatnonzero(pool.row_of != FREE)
    assert len(used) == pool.num_blocks - pool.num_free == sum(-(-length // SIZE) for length in lengths)
    table = pool.table(np.arange(len(lengths)))
    for row, (length, name) in enumerate(zip(lengths, names, strict=True)):
        blocks = pool.blocks_of(row)
        assert table[row, : len(blocks)].tolist() == blocks.tolist()
        assert content[blocks].tolist() == [[name, order] for order in range(-(-length // SIZE))]
        if length:
            assert table[row, pool.count_of[row] - 1] == blocks[-1]


@given(st.lists(st.tuples(st.sampled_from(["add", "grow", "remove", "exchange"]), st.integers(0, 2**16)), max_size=60))
def test_rows_keep_their_blocks(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(60, SIZE, num_rows=10)
    content = np.full((60, 2), -1)
    lengths: list[int] = []
    names: list[int] = []

    def grow(row: int, length: int) -> None:
        rows, wanted = np.array([row]), np.array([length])
        assert pool.missing(rows, wanted)[0] == -(-length // SIZE) - -(-lengths[row] // SIZE)
        before = -(-lengths[row] // SIZE)
        blocks = pool.grow(rows, wanted)
        content[blocks, 0], content[blocks, 1] = names[row], before + np.arange(len(blocks))
        lengths[row] = length

    for number, (action, value) in enumerate(actions):
        if action == "add" and len(lengths) < 10 and pool.num_free >= 6:
            lengths.append(0)
            names.append(number)
            grow(len(lengths) - 1, value % 20)
        elif action == "grow" and lengths and pool.num_free:
            row = value % len(lengths)
            grow(row, lengths[row] + 1)
        elif action == "remove" and lengths:
            row, last = value % len(lengths), len(lengths) - 1
            pool.release(np.array([row]))
            if row != last:
                pool.exchange(Moves(np.array([last]), np.array([row])))
            lengths[row], names[row] = lengths[last], names[last]
            lengths.pop()
            names.pop()
        elif action == "exchange" and len(lengths) > 1:
            row, other = value % len(lengths), (value + 1) % len(lengths)
            pool.exchange(Moves(np.array([row]), np.array([other])))
            for column in (lengths, names):
                column[row], column[other] = column[other], column[row]
        check(pool, lengths, content, names)
