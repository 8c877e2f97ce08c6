"""Seconds of a refit, of copies to host memory, and of a save."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple

from hpcrl.forecast.time.collectives import Network
from hpcrl.forecast.time.cost import Cost
from hpcrl.runtime.layout import Layout

STAGED = 4.0  # times that a refit reads or writes a byte that it moves: packed, and unpacked


class Moved(NamedTuple):
    """Shares of the model's weights that a rank of a refit sends, receives from its node and from others, and copies;
    peers: ranks that it receives from."""

    sent: float
    near: float
    far: float
    copied: float
    peers: int


@lru_cache(maxsize=1024)
def refit_shares(
    source: Layout, destination: Layout, stages: tuple[float, ...], ranks_per_node: int
) -> tuple[Moved, ...]:
    """What each distinct rank moves, as `hpcrl.engine.refit.planner` has it: a rank copies what it holds, receives the rest
    once, from its own node if a rank of the node holds it, and senders have equal shares.

    stages: of the weights, the share of each pipeline stage; all weights of a stage count as divided by tensor
    parallelism, experts and norms too.
    """
    own = {rank: (it.pp, it.tp) for rank in source.ranks for it in [source.coord(rank)]}
    on_node: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for rank, part in own.items():
        on_node[rank // ranks_per_node].add(part)
    on_nodes = {node: frozenset(parts) for node, parts in on_node.items()}
    alike = Counter(
        (destination.coord(rank).tp, own.get(rank), on_nodes.get(rank // ranks_per_node, frozenset()))
        for rank in destination.ranks
    )

    def overlap(part: tuple[int, int], wanted: int) -> float:
        stage, slice_ = part
        low = max(wanted / destination.tp, slice_ / source.tp)
        high = min((wanted + 1) / destination.tp, (slice_ + 1) / source.tp)
        return stages[stage] * max(0.0, high - low)

    needs = []
    for (wanted, held, beside), count in alike.items():
        copied = overlap(held, wanted) if held is not None else 0.0
        there = sum(overlap(part, wanted) for part in sorted(beside))
        near, far = max(0.0, there - copied), max(0.0, 1 / destination.tp - max(there, copied))
        needs.append((count, held is not None, near, far, copied))
    sent = sum(count * (near + far) for count, _, near, far, _ in needs) / source.size
    most = source.pp * math.ceil(source.tp / destination.tp)
    found = {
        Moved(sent * sends, near, far, copied, most if near + far > 1e-9 else 0)
        for _, sends, near, far, copied in needs
    }
    if any(rank not in destination for rank in source.ranks):
        found.add(Moved(sent, 0.0, 0.0, 0.0, 0))
    return tuple(found)


def refit_cost(
    shares: tuple[Moved, ...], nbytes: float, network: Network, bandwidth: float, busy: int, *, aliases: bool
) -> Cost:
    """Of the rank that takes longest, which sends and receives at the same time; what the actor and the engine share is
    not copied. nbytes: of the whole model in the engine's dtype. bandwidth: of a rank's memory. busy: ranks of a
    node."""
    inside, between = network.inside, network.between(busy)

    def seconds(it: Moved) -> tuple[float, float]:
        near, far = it.near * nbytes, it.far * nbytes
        received = near / inside.bandwidth + far / between.bandwidth
        link = between if it.far else inside
        sent = it.sent * nbytes / link.bandwidth
        memory = STAGED / 2 * (near + far + it.sent * nbytes) + (0 if aliases else 2.0 * it.copied * nbytes)
        return max(received, sent) + it.peers * link.latency, memory / bandwidth

    communication, memory = max(map(seconds, shares), key=sum)
    return Cost(communication=communication, memory=memory)
