"""Seconds by what limits them, and the roofline of one operator."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from typing import NamedTuple

from hpcrl.machine.machine_file import Device, Dtype, Machine, Rate

NEAREST: dict[Dtype, tuple[Dtype, ...]] = {  # the rates to take, in this order
    "float32": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float32"),
}


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

    @property
    def busy(self) -> float:
        """Seconds in which a core computes or copies."""
        return self.seconds - self.bubble - self.waiting

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*map(add, self, other))

    def __mul__(self, factor: float) -> Cost:  # type: ignore[override]
        return Cost(*(seconds * factor for seconds in self))

    def slowed(self, efficiency: float, communication: float = 1.0) -> Cost:
        """All but communication takes 1 / efficiency times as long, and that 1 / communication times."""
        return (self * (1 / efficiency))._replace(communication=self.communication / communication)

    def shares(self) -> dict[str, float]:
        """Each kind's share of the seconds; kinds without any are left out."""
        total = self.seconds
        return {kind: seconds / total for kind, seconds in self._asdict().items() if seconds > 0}


NOTHING = Cost()


def fitted(cost: Cost, machine: Machine, phase: str) -> Cost:
    """A phase's cost with the machine's efficiencies."""
    return cost.slowed(machine.efficiency.get(phase, 1.0), machine.communication.get(phase, 1.0))


def rate_of(rates: Mapping[Dtype, Rate], dtype: Dtype) -> Rate:
    """The rate of a dtype, or of the nearest one that the machine has."""
    found = next((rates[other] for other in NEAREST[dtype] if other in rates), None)
    return found or next(iter(rates.values()))


class Units(NamedTuple):
    """A device at one dtype. flops, half_rows: of products; attended: operations per second of attention. replays:
    whether operators are launched by a CUDA graph; is_ahead: by a host, while the device still computes earlier ones.
    """

    itemsize: int
    flops: float
    half_rows: float
    attended: Rate
    bandwidth: float
    launch: float
    replays: bool
    is_ahead: bool

    @classmethod
    def of(cls, device: Device, dtype: Dtype, itemsize: int, *, replays: bool = False) -> Units:
        """replays: whether operators are launched by a CUDA graph, if the device has them."""
        product, attended = rate_of(device.matmul, dtype), rate_of(device.attention, dtype)
        replays = replays and device.replay > 0
        launch, is_ahead = device.replay if replays else device.launch, device.kind == "gpu" and not replays
        rates = product.flops, product.half_rows, attended, device.memory_bandwidth
        return cls(itemsize, *rates, launch, replays, is_ahead)

    def product(self, rows: float, inner: float, outer: float, *, groups: float = 1.0) -> Cost:
        """(rows, inner) times (inner, outer), `rows` divided over so many groups, each with a matrix of its own.

        max(operations / rate, bytes / bandwidth) + launch: the roofline (Williams, Waterman and Patterson 2009). The
        rate of r rows is flops * r / (r + half_rows), Hockney's n1/2 (Hockney and Jesshope 1988), so the time of the
        operations is 2 inner outer (r + half_rows) / flops per group. What memory takes longer counts as memory.
        """
        computing = 2.0 * inner * outer * (rows + groups * self.half_rows) / self.flops
        moving = (rows * (inner + outer) + groups * inner * outer) * self.itemsize / self.bandwidth
        return Cost(products=computing, memory=max(0.0, moving - computing), launches=self.launch)

    def attention(self, pairs: float, rows: float, width: float) -> Cost:
        """Causal attention over so many pairs of tokens, of sequences of `rows` tokens in the mean; width: of queries
        and of values, of all heads of the rank. Two operations for each number of a pair: scores, and values."""
        slowed = 1.0 + self.attended.half_rows / max(rows, 1.0)
        return Cost(attention=2.0 * pairs * width * slowed / self.attended.flops, launches=self.launch)

    def moved(self, nbytes: float, operators: float = 1.0) -> Cost:
        """Operators that only read and write memory."""
        return Cost(memory=nbytes / self.bandwidth, launches=operators * self.launch)
