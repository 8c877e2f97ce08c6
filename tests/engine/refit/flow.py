"""The exact least largest load, by maximum flow: what the planner's choice of senders is measured against."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from fractions import Fraction


def least_largest_load(demands: Mapping[frozenset[int], int]) -> Fraction:
    """The smallest L such that every demand (candidates -> amount) can be served with no candidate above L.

    Newton's method on the cut: while L is too small, the senders on the source's side of a minimum cut carry more than
    L each even when they serve only the demands that nobody else can; L becomes that mean. Exact, a few rounds.
    """
    load = Fraction(0)
    if not demands:
        return load
    load = Fraction(sum(demands.values()), len(frozenset().union(*demands)))
    while True:
        crowded = _overloaded(demands, load)
        if not crowded:
            return load
        load = Fraction(sum(n for senders, n in demands.items() if senders <= crowded), len(crowded))


def _overloaded(demands: Mapping[frozenset[int], int], load: Fraction) -> frozenset[int]:
    """Senders that cannot carry at most `load` each what only they can carry; empty when all fits."""
    scale, limit = load.denominator, load.numerator  # integer capacities
    capacity: dict[object, dict[object, int]] = defaultdict(lambda: defaultdict(int))
    for senders, amount in demands.items():
        capacity["source"][senders] = amount * scale
        for sender in senders:
            capacity[senders][sender] = amount * scale
            capacity[sender]["sink"] = limit
    while True:
        came_from: dict[object, object] = {"source": None}
        queue: deque[object] = deque(["source"])
        while queue and "sink" not in came_from:
            place = queue.popleft()
            for onward, room in list(capacity[place].items()):
                if room > 0 and onward not in came_from:
                    came_from[onward] = place
                    queue.append(onward)
        if "sink" not in came_from:
            reached = frozenset(place for place in came_from if isinstance(place, int))
            stuck = any(capacity["source"][senders] > 0 for senders in demands)
            return reached if stuck else frozenset()
        path, place = [], "sink"
        while place != "source":
            path.append((came_from[place], place))
            place = came_from[place]  # type: ignore[assignment]
        amount = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= amount
            capacity[b][a] += amount
