"""Which of several possible senders sends how much, so that none has more to do than it must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

SWEEPS = 200
TOLERANCE = 1000  # loads are settled once no share changes by more than a thousandth of the largest load


class Demand(NamedTuple):
    """Bytes any part of which any of `senders` may send."""

    senders: Sequence[int]
    nbytes: int


def balanced(demands: Sequence[Demand]) -> list[list[int]]:
    """For each demand the bytes of each of its senders, such that over all demands the loads are as equal as the
    choice of senders allows: the largest is the least possible, then the second largest, and so on.

    That is where the sum of squared loads is least (Hajek, 1990). Pouring one demand at a time onto the emptiest of
    its senders lowers that sum until it is there, within TOLERANCE. Integers only, so every rank gets the same.
    """
    load: dict[int, int] = defaultdict(int)
    shares = [[0] * len(demand.senders) for demand in demands]
    fewest_first = sorted(range(len(demands)), key=lambda number: len(demands[number].senders))
    for _ in range(SWEEPS):
        change = 0
        for number in fewest_first:
            senders, nbytes = demands[number]
            before = shares[number]
            others = [load[sender] - share for sender, share in zip(senders, before, strict=True)]
            after = shares[number] = _pour(nbytes, others)
            for sender, other, share in zip(senders, others, after, strict=True):
                load[sender] = other + share
            change = max(change, *(abs(new - old) for new, old in zip(after, before, strict=True)))
        if change * TOLERANCE <= max(load.values(), default=0):
            break
    return shares


def _pour(nbytes: int, levels: list[int]) -> list[int]:
    """What each vessel takes of `nbytes` when they fill the lowest of `levels` up to one common level."""
    order = sorted(range(len(levels)), key=levels.__getitem__)
    below = 0
    for count, place in enumerate(order, start=1):
        below += levels[place]
        if count == len(order) or (nbytes + below) <= levels[order[count]] * count:
            break
    level, rest = divmod(nbytes + below, count)
    taken = [0] * len(levels)
    for turn, place in enumerate(sorted(order[:count])):
        taken[place] = level - levels[place] + (turn < rest)
    return taken
