"""Seconds by what limits them: the roofline of one operator, and communication in a group of ranks and of a refit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

from hpcrl.machine.machine_file import Device, Dtype, Link, Machine, Rate, ring_link
from hpcrl.runtime.layout import Layout


class Cost(NamedTuple):
    """Seconds, by what limits them. copies: between device and host memory, and to the file system. waiting: for a
    core, or for ranks with more work."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    copies: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*map(add, self, other))

    def __mul__(self, factor: float) -> Cost:  # type: ignore[override]
        return Cost(*(seconds * factor for seconds in self))

    def shares(self) -> dict[str, float]:
        """Each kind's share of the seconds; kinds without any are left out."""
        total = self.seconds
        return {kind: seconds / total for kind, seconds in self._asdict().items() if seconds > 0}


NOTHING = Cost()


def fitted(cost: Cost, machine: Machine, phase: str) -> Cost:
    """A phase's cost with the machine's efficiencies: of communication, and of all else."""
    communication = cost.communication / machine.communication.get(phase, 1.0)
    return (cost * (1 / machine.efficiency.get(phase, 1.0)))._replace(communication=communication)


def rate_of(rates: Mapping[Dtype, Rate], dtype: Dtype) -> Rate:
    """The rate of a dtype, or of the nearest one that the machine has."""
    nearest: tuple[Dtype, ...] = (dtype, "bfloat16", "float32", *rates)
    return next(rates[other] for other in nearest if other in rates)


class Units(NamedTuple):
    """A device at one dtype. weight_itemsize: bytes that a product moves for each number of a weight. flops, half_rows:
    of products; attended: operations per second of attention. replays: whether operators are launched by a CUDA graph;
    is_ahead: by a host, while the device still computes earlier ones.
    """

    itemsize: int
    weight_itemsize: int
    flops: float
    half_rows: float
    attended: Rate
    bandwidth: float
    launch: float
    replays: bool
    is_ahead: bool

    @classmethod
    def of(cls, device: Device, dtype: Dtype, itemsize: int, *, replays: bool = False) -> Units:
        """Return the units of a device and a dtype.

        Args:
            replays: whether operators are launched by a CUDA graph, if the device has them.
        """
        product, attended = rate_of(device.matmul, dtype), rate_of(device.attention, dtype)
        replays = replays and device.replay > 0
        launch, is_ahead = device.replay if replays else device.launch, device.kind == "gpu" and not replays
        rates = product.flops, product.half_rows, attended, device.memory_bandwidth
        return cls(itemsize, itemsize, *rates, launch, replays, is_ahead)

    def with_8_bit_weights(self, device: Device) -> Units:
        """Return the device for products of weights in 8 bits. One without 8-bit products dequantises each weight to
        memory before its product."""
        if "float8" not in device.matmul:
            return self._replace(weight_itemsize=1 + 2 * self.itemsize)
        rate = device.matmul["float8"]
        return self._replace(weight_itemsize=1, flops=rate.flops, half_rows=rate.half_rows)

    def product(self, rows: float, inner: float, outer: float, *, groups: float = 1.0) -> Cost:
        """(rows, inner) times (inner, outer), `rows` divided over so many groups, each with a matrix of its own.

        max(operations / rate, bytes / bandwidth) + launch: the roofline (Williams, Waterman and Patterson 2009). The
        rate of r rows is flops * r / (r + half_rows), Hockney's n1/2 (Hockney and Jesshope 1988), so the time of the
        operations is 2 inner outer (r + half_rows) / flops per group. What memory takes longer counts as memory.
        """
        computing = 2.0 * inner * outer * (rows + groups * self.half_rows) / self.flops
        nbytes = rows * (inner + outer) * self.itemsize + groups * inner * outer * self.weight_itemsize
        moving = nbytes / self.bandwidth
        return Cost(products=computing, memory=max(0.0, moving - computing), launches=self.launch)

    def attention(self, pairs: float, rows: float, width: float) -> Cost:
        """Causal attention over so many pairs of tokens, of sequences of `rows` tokens in the mean. Two operations for
        each number of a pair: scores, and values.

        Args:
            width: width of queries and of values, over all heads of the rank.
        """
        slowed = 1.0 + self.attended.half_rows / max(rows, 1.0)
        return Cost(attention=2.0 * pairs * width * slowed / self.attended.flops, launches=self.launch)

    def moved(self, nbytes: float, operators: float = 1.0) -> Cost:
        """Operators that only read and write memory."""
        return Cost(memory=nbytes / self.bandwidth, launches=operators * self.launch)


class Group(NamedTuple):
    """Ranks that communicate. per_node: those of one node, the fewest of any node. busy: ranks of a node that
    communicate between nodes at the same time, in this group and in others of its kind."""

    size: int
    per_node: int
    busy: int

    @property
    def is_inside(self) -> bool:
        return self.per_node == self.size

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.per_node)


@lru_cache(maxsize=8192)
def group_of(layout: Layout, ranks_per_node: int, *dims: str) -> Group:
    """The group with the fewest ranks on one node, of those whose ranks differ along `dims`."""
    groups = layout.groups(*dims)
    fewest = len(groups[0])
    for group in groups:
        fewest = min(fewest, *Counter(rank // ranks_per_node for rank in group).values())
    busy = max(Counter(rank // ranks_per_node for rank in layout.ranks).values())
    return Group(len(groups[0]), fewest, busy)


class Network(NamedTuple):
    """The links of a machine. shared: bytes per second of all ranks of a node; None: no limit. has_rings: whether all
    ranks of a node send to other nodes at the same time in one collective. shares: by ranks of a group, ascending.
    cores, contention: of a node, see `hpcrl.machine.machine_file.Node`."""

    inside: Link
    outside: Link
    shared: float | None
    has_rings: bool
    shares: tuple[tuple[int, float], ...]
    cores: float | None = None
    contention: float = 0.0

    @classmethod
    def of(cls, machine: Machine, ranks_per_node: int | None = None) -> Network:
        """Return the network of a machine.

        Args:
            ranks_per_node: ranks of the job on a node; None: as many as the machine is made for.
        """
        links, node, is_gpu = machine.links, machine.node, machine.device.kind == "gpu"
        is_crowded = node.cores is not None and (ranks_per_node or node.ranks) > node.cores
        cores = node.cores, node.contention if is_crowded else 0.0
        return cls(links.inside, links.between, node.network, is_gpu, tuple(sorted(links.group.items())), *cores)

    def between(self, busy: int) -> float:
        """Bytes per second between nodes, of which each has so many ranks that communicate at the same time."""
        return min(self.outside.bandwidth, math.inf if self.shared is None else self.shared / busy)

    def link(self, group: Group) -> float:
        """Bytes per second of each hop of a ring over the group. Between nodes, a ring of a GPU for each of a node's
        members shares the bytes (NCCL's channels), until the links inside a node limit it."""
        inside, share = self.inside.bandwidth, interpolated(self.shares, group.size)
        if group.is_inside:
            return inside * share
        return ring_link(inside, self.between(group.busy), group.per_node if self.has_rings else 1) * share

    def contended(self, group: Group) -> float:
        """Seconds in which the ranks wait for one of them that has no core. They are part of a task that takes longer
        where ranks share cores, and are divided by how much longer."""
        return self.contention * min(1.0, (self.cores or math.inf) / group.busy) * (group.size > 1)

    def all_gather(self, nbytes: float, group: Group) -> float:
        """Ring: (n - 1) (latency + B / n / bandwidth), of B bytes that all ranks have in the end (Thakur, Rabenseifner
        and Gropp 2005, section 4.1). A reduce-scatter of B bytes takes the same (section 4.3). Of the hops, one fewer
        than nodes are between nodes, as in NCCL's tuning model."""
        return self.contended(group) + self._ring(nbytes, group)

    def _ring(self, nbytes: float, group: Group) -> float:
        hops = group.size - 1
        return self._latency(hops, group.nodes - 1) + hops * nbytes / group.size / self.link(group)

    def all_reduce(self, nbytes: float, group: Group) -> float:
        """The faster of a ring, a reduce-scatter and an all-gather, and of recursive doubling, lg n (latency + B /
        bandwidth), which suits short messages (Thakur et al. 2005, section 4.5); its last rounds are between nodes."""
        rounds, far = (math.ceil(math.log2(count)) for count in (group.size, group.nodes))
        doubling = self._latency(rounds, far) + rounds * nbytes / self.link(group)
        return self.contended(group) + min(2 * self._ring(nbytes, group), doubling)

    def _latency(self, hops: int, far: int) -> float:
        """Of so many hops after each other, `far` of them between nodes."""
        return (hops - far) * self.inside.latency + far * self.outside.latency

    def all_to_all(self, nbytes: float, group: Group) -> float:
        """Each rank sends B / n bytes to each other rank; what leaves its node takes the network, the rest at the same
        time the links inside (Thakur et al. 2005, section 4.4, pairwise exchange)."""
        inside, outside = self.inside, self.outside
        near, far = group.per_node - 1, group.size - group.per_node
        latency = near * inside.latency + far * outside.latency
        share, bandwidth = nbytes / group.size, inside.bandwidth * interpolated(self.shares, group.per_node)
        return self.contended(group) + latency + max(near * share / bandwidth, far * share / self.between(group.busy))

    def send(self, nbytes: float, group: Group) -> float:
        """One message to a neighbour of the group."""
        if group.size < 2:
            return 0.0
        link = self.inside if group.is_inside else self.outside
        bandwidth = link.bandwidth if group.is_inside else self.between(group.busy)
        return self.contended(group) + link.latency + nbytes / bandwidth


def interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    """Linear between points, which ascend, and constant beyond them; 1 without any."""
    if not points:
        return 1.0
    above = next((place for place, (size, _) in enumerate(points) if size >= at), len(points) - 1)
    if above == 0 or at >= points[-1][0]:
        return points[above][1]
    (low, first), (high, last) = points[above - 1], points[above]
    return first + (last - first) * (at - low) / (high - low)


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
    """What each distinct rank moves, as `hpcrl.engine.refit.planner` has it: a rank copies what it holds, receives the
    rest once, from its own node if a rank of the node holds it, and senders have equal shares.

    Args:
        stages: each pipeline stage's share of the weights; all weights of a stage count as divided by tensor
            parallelism, experts and norms too.
    """
    parts = {rank: (it.pp, it.tp) for rank in source.ranks for it in [source.coord(rank)]}
    on_node: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for rank, part in parts.items():
        on_node[rank // ranks_per_node].add(part)
    on_nodes = {node: frozenset(its) for node, its in on_node.items()}
    alike = Counter(
        (destination.coord(rank).tp, parts.get(rank), on_nodes.get(rank // ranks_per_node, frozenset()))
        for rank in destination.ranks
    )

    def overlap(part: tuple[int, int], target: int) -> float:
        stage, slice_ = part
        low = max(target / destination.tp, slice_ / source.tp)
        high = min((target + 1) / destination.tp, (slice_ + 1) / source.tp)
        return stages[stage] * max(0.0, high - low)

    needs = []
    for (target, held, beside), count in alike.items():
        copied = overlap(held, target) if held is not None else 0.0
        there = sum(overlap(part, target) for part in sorted(beside))
        near, far = max(0.0, there - copied), max(0.0, 1 / destination.tp - max(there, copied))
        needs.append((count, held is not None, near, far, copied))
    sent = sum(count * (near + far) for count, _, near, far, _ in needs) / source.size
    most = source.pp * math.ceil(source.tp / destination.tp)
    shares = {Moved(sent * sends, near, far, own, most * (near + far > 1e-9)) for _, sends, near, far, own in needs}
    if any(rank not in destination for rank in source.ranks):
        shares.add(Moved(sent, 0.0, 0.0, 0.0, 0))
    return tuple(shares)


def refit_cost(
    shares: tuple[Moved, ...], nbytes: float, network: Network, bandwidth: float, busy: int, *, aliases: bool
) -> Cost:
    """Cost of the rank that takes longest, which sends and receives at the same time; what the actor and the engine
    share is not copied.

    Args:
        nbytes: bytes of the whole model in the engine's dtype.
        bandwidth: bandwidth of a rank's memory.
        busy: ranks of a node.
    """
    inside, between = network.inside, network.between(busy)

    def seconds(it: Moved) -> tuple[float, float]:
        near, far = it.near * nbytes, it.far * nbytes
        received = near / inside.bandwidth + far / between
        latency, rate = (network.outside.latency, between) if it.far else (inside.latency, inside.bandwidth)
        sent = it.sent * nbytes / rate
        memory = STAGED / 2 * (near + far + it.sent * nbytes) + (0 if aliases else 2.0 * it.copied * nbytes)
        return max(received, sent) + it.peers * latency, memory / bandwidth

    communication, memory = max(map(seconds, shares), key=sum)
    return Cost(communication=communication, memory=memory)
