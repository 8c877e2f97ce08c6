"""Which tokens of a packed micro-batch each rank of a context-parallel group has, and what its queries look at.

The packed tokens are cut into 2 cp chunks, of which rank r has the r-th from either end: under causal attention the
ranks then have about equally much to do (Llama 3 report, arXiv:2407.21783, section 3.3.2). Keys and values are
gathered, queries stay. Functions of integers alone; every rank computes them for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcrl.model.buckets import Places, places_of


@dataclass(frozen=True)
class Tail:
    """A chunk's tokens of a sequence that began in an earlier chunk: `queries` of them, which look at the `keys`, int64
    (K,) places among the gathered tokens, from the sequence's first one to the last query."""

    queries: int
    keys: Tensor


def tokens_of(size: int, rank: int, cp: int) -> Tensor:
    """int64 (size / cp,): the packed tokens that `rank` has, in its order; 2 cp divides `size`."""
    chunk = size // (2 * cp)
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def places(size: int, cp: int) -> Tensor:
    """int64 (size,): where each packed token is once the ranks' tokens are gathered in rank order."""
    order = torch.cat([tokens_of(size, rank, cp) for rank in range(cp)])
    found = torch.empty_like(order)
    found[order] = torch.arange(size)
    return found


def runs_of(lengths: Tensor, size: int, rank: int, cp: int) -> tuple[Places, tuple[Tail, ...]]:
    """Where the attention of a rank has its tokens. `lengths` int64 (sequences,) are those of the packed sequences,
    which `size` tokens hold, with padding behind them.

    In the buckets, by local token: what lies in one chunk of a sequence that begins there, and so looks at tokens of
    this rank alone. Behind them the queries of the tails, of which there are two at most, at the beginning of a chunk.
    """
    chunk = size // (2 * cp)
    begun: list[tuple[int, int]] = []  # first local token, tokens
    alone, tails = [], []
    gathered = places(size, cp)
    ends = lengths.cumsum(0).tolist()
    for number, place in enumerate((rank, 2 * cp - 1 - rank)):
        low, high = place * chunk, (place + 1) * chunk
        for end, length in zip(ends, lengths.tolist(), strict=True):
            start, first, behind = end - length, max(low, end - length), min(high, end)
            local = number * chunk + first - low
            if first < behind and first == start:
                begun.append((local, behind - first))
            elif first < behind:
                alone.append(torch.arange(local, local + behind - first))
                tails.append(Tail(behind - first, gathered[start:behind]))
    firsts, counts = torch.tensor(begun, dtype=torch.int64).view(-1, 2).unbind(1)
    return places_of(firsts, counts, torch.cat([*alone, firsts[:0]])), tuple(tails)
