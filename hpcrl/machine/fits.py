"""Coefficients of rates and links from measured times. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Sequence


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of seconds = intercept + slope * size, both at least 0.

    Least squares of the relative errors, so that short times count as much as long ones. With one point the line goes
    through 0. Raises ValueError without points, or if a time is not positive.
    """
    if not sizes or min(seconds) <= 0:
        raise ValueError(f"a fit needs positive times, found {list(seconds)}")
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_size = sum(weight * size for weight, size in zip(weights, sizes, strict=True)) / total
    mean_time = sum(weight * second for weight, second in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in points)
    slope = sum(weight * (size - mean_size) * (second - mean_time) for weight, size, second in points) / (spread or 1.0)
    intercept = mean_time - slope * mean_size
    if slope <= 0 and spread > 0:  # longer for smaller sizes: noise
        return mean_time, 0.0
    if intercept < 0 or spread == 0:
        squares = sum(weight * size**2 for weight, size, _ in points)
        return 0.0, sum(weight * size * second for weight, size, second in points) / squares
    return intercept, slope


def fit_rate(rows: Sequence[int], seconds: Sequence[float], ops_per_row: float) -> tuple[float, float]:
    """(flops, half_rows) of seconds = (rows + half_rows) * ops_per_row / flops (Hockney and Jesshope 1988).

    If more rows take no longer, the rate is that of the largest product, and half_rows is 0.
    """
    intercept, slope = fit_line(rows, seconds)
    if slope == 0:
        return ops_per_row * rows[-1] / seconds[-1], 0.0
    return ops_per_row / slope, intercept / slope


def fit_link(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, bandwidth) of seconds = latency + bytes / bandwidth (Hockney 1994).

    If larger messages take no longer, the bandwidth is that of the largest message.
    """
    latency, slope = fit_line(nbytes, seconds)
    return latency, 1 / slope if slope else nbytes[-1] / seconds[-1]


def bus_bandwidth(ranks: int, nbytes: int, seconds: float) -> float:
    """Bytes per second that each rank of an all-reduce sends and receives at least: 2 (n - 1) / n * bytes / seconds, as
    nccl-tests define it."""
    return 2 * (ranks - 1) / ranks * nbytes / seconds


def group_sizes(ranks: int) -> list[int]:
    """2, 4, 8, ... up to `ranks`, and `ranks` itself."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return sizes if ranks < 2 or ranks in sizes else [*sizes, ranks]


def shared_cores(single: float, together: Sequence[float]) -> float:
    """Ranks that compute at full speed at the same time: the sum of the rates `together` in units of the rate `single`
    of one rank while the others wait, at most the number of ranks."""
    return min(sum(together) / single, float(len(together)))


def crowding(size: int, nodes: Sequence[Sequence[int]], cores: float | None) -> float:
    """How much longer the first `size` ranks take that compute at the same time, where the ranks of a node share so
    many cores; None: each has its own."""
    if cores is None:
        return 1.0
    return max(1.0, *(sum(rank < size for rank in ranks) / cores for ranks in nodes))


def ring_bandwidth(size: int, nodes: Sequence[Sequence[int]], inside: float, between: float, has_rings: bool) -> float:
    """Bandwidth of the links that a collective of the first `size` ranks uses, of which the all-reduce has a share.

    nodes: ranks of each node. has_rings: between nodes, each rank of a node has a ring of its own (NCCL's channels), up
    to the bandwidth inside a node.
    """
    each = [count for ranks in nodes if (count := sum(rank < size for rank in ranks))]
    if len(each) == 1:
        return inside
    return ring_link(inside, between, min(each) if has_rings else 1)


def ring_link(inside: float, between: float, rings: int) -> float:
    """Bandwidth between nodes of so many rings that share the bytes, until the links inside a node limit them."""
    return min(inside, rings * between) if rings > 1 else between
