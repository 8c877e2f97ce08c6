"""Runs of a context-parallel rank: each token once, and each query sees its own sequence up to itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.model.gpt import gathered_places, local_runs, tokens_of_rank


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    cp=st.sampled_from([2, 3, 4]),
    more=st.integers(0, 2),
)
def test_queries_see_their_sequence_up_to_themselves(lengths: list[int], cp: int, more: int) -> None:
    total = sum(lengths)
    size = (-(-total // (2 * cp)) + more) * 2 * cp
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    gathered = torch.cat([tokens_of_rank(size, rank, cp) for rank in range(cp)])
    assert torch.equal(gathered[gathered_places(size, cp)], torch.arange(size))
    seen: list[int] = []
    for rank in range(cp):
        mine = tokens_of_rank(size, rank, cp)
        inside, tails = local_runs(torch.tensor(lengths), size, rank, cp)
        padded = sum(bucket.size for bucket in inside.buckets)
        row_of = [row for bucket in inside.buckets for row in [bucket.width] * bucket.rows]
        firsts = torch.repeat_interleave(
            torch.tensor([0, *row_of]).cumsum(0)[:-1], torch.tensor(row_of).long()
        ).tolist()
        keys_of = [tail.keys[: len(tail.keys) - tail.queries + 1 + n] for tail in tails for n in range(tail.queries)]
        assert len(inside.sources) == padded + len(keys_of) and len(tails) <= 2
        for local, slot in enumerate(inside.slots.tolist()):
            assert inside.sources[slot] == local
            token = int(mine[local])
            first = int((sequence == sequence[token]).nonzero()[0])
            if slot < padded:  # its keys are the tokens of this rank from the beginning of its row
                looked_at = mine[inside.sources[firsts[slot] : slot + 1]]
            else:
                looked_at = gathered[keys_of[slot - padded]]
            assert looked_at.tolist() == list(range(first, token + 1))
            seen.append(token)
    assert sorted(seen) == list(range(total))


def test_the_ranks_have_about_equally_much_to_do() -> None:
    """Pairs of query and key in one long sequence, where contiguous shares would differ by a factor of 2 cp - 1."""
    size, cp = 1024, 4
    work = [int((tokens_of_rank(size, rank, cp) + 1).sum()) for rank in range(cp)]
    assert max(work) == min(work)
