"""Runs of successive tokens, each of its own length, as a few padded arrays: what fused attention takes.

One array for all would be as wide as the longest run; runs of less than half of that go to an array of their own, so
that no array is more than half padding. Functions of integers alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """`rows` runs, padded at the end to `width` tokens each."""

    rows: int
    width: int

    @property
    def size(self) -> int:
        return self.rows * self.width


class Places(NamedTuple):
    """Of T tokens in the buckets, one bucket after the other, and behind them one place each for `alone` tokens.

    Both int64: slots (T,) the place of token t; sources (places,) the token at a place, any one where it is padding.
    """

    buckets: tuple[Bucket, ...]
    slots: Tensor
    sources: Tensor


def places_of(firsts: Tensor, lengths: Tensor, alone: Tensor | None = None) -> Places:
    """Runs begin at tokens `firsts` int64 (N,) and have `lengths` (N,), at least 1 each; with `alone` int64 they hold
    each of the tokens 0 to T - 1 once."""
    order = lengths.argsort(descending=True, stable=True)
    sizes = lengths[order].tolist()
    buckets: list[Bucket] = []
    for length in sizes:
        if buckets and 2 * length >= buckets[-1].width:
            buckets[-1] = Bucket(buckets[-1].rows + 1, buckets[-1].width)
        else:
            buckets.append(Bucket(1, length))
    sources, taken = [], []
    runs = torch.stack([firsts[order], lengths[order]], 1).split([bucket.rows for bucket in buckets])
    for bucket, members in zip(buckets, runs, strict=True):
        offsets = torch.arange(bucket.width)
        is_token = offsets < members[:, 1:]
        sources.append(torch.where(is_token, members[:, :1] + offsets, 0).flatten())
        taken.append(is_token.flatten())
    if alone is not None:
        sources.append(alone)
        taken.append(torch.ones(len(alone), dtype=torch.bool))
    source, is_taken = (torch.cat(parts) for parts in (sources, taken))
    slots = torch.empty(int(is_taken.sum()), dtype=torch.int64)
    slots[source[is_taken]] = is_taken.nonzero().squeeze(1)
    return Places(tuple(buckets), slots, source)
