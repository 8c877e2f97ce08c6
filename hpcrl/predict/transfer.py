"""Seconds of a refit, of copies to host memory, and of a save."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from hpcrl.grid.layout import Layout
from hpcrl.predict.collectives import Network
from hpcrl.predict.cost import Cost

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
    """What each distinct rank moves, as `hpcrl.reshard.planner` has it: a rank copies what it holds, receives the rest
    once, from its own node if a rank of the node holds it, and senders have equal shares.

    stages: of the weights, the share of each pipeline stage; all weights of a stage count as divided by tensor
    parallelism, experts and norms too.
    """
    on_node: dict[int, set[tuple[int, int]]] = defaultdict(set)
    own: dict[int, tuple[int, int]] = {}
    for rank in source.ranks:
        coord = source.coord(rank)
        own[rank] = coord.pp, coord.tp
        on_node[rank // ranks_per_node].add(own[rank])
    needs = []
    for rank in destination.ranks:
        part = destination.coord(rank).tp

        def overlap(held: tuple[int, int], part: int = part) -> float:
            stage, slice_ = held
            low = max(part / destination.tp, slice_ / source.tp)
            high = min((part + 1) / destination.tp, (slice_ + 1) / source.tp)
            return stages[stage] * max(0.0, high - low)

        whole = 1 / destination.tp
        copied = overlap(own[rank]) if rank in own else 0.0
        there = sum(map(overlap, on_node[rank // ranks_per_node]))
        peers = source.pp * math.ceil(source.tp / destination.tp)
        near, far = max(0.0, there - copied), max(0.0, whole - max(there, copied))
        needs.append((rank, copied, near, far, peers if near + far > 1e-9 else 0))
    sent = sum(near + far for _, _, near, far, _ in needs) / source.size
    found = {Moved(sent if rank in own else 0.0, near, far, copied, peers) for rank, copied, near, far, peers in needs}
    found |= {Moved(sent, 0.0, 0.0, 0.0, 0) for rank in source.ranks if rank not in destination}
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
