"""Statistics of groups, masked whitening and segmented scans in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.reductions import Rows

GROUPS = 32  # per program: samples of a group are scattered, so that wider programs would only be fewer
COLUMNS = 256  # per program
MOMENTS_WARPS, SUMS_WARPS = 1, 4


@triton.jit(do_not_specialize=["groups"])
def group_moments_kernel(score, order, offsets, size, mean, std, groups, GROUPS: tl.constexpr):
    """Three passes over the samples of GROUPS groups: sums, squares, and the results of each sample."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    begin = tl.load(offsets + group, mask=group < groups, other=0)
    count = tl.load(offsets + group + 1, mask=group < groups, other=0) - begin
    most = tl.max(count)
    total, squares = tl.zeros((GROUPS,), tl.float64), tl.zeros((GROUPS,), tl.float64)
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        total += tl.load(score + sample, mask=number < count, other=0.0).to(tl.float64)
    average = total / tl.maximum(count, 1).to(tl.float64)
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        value = tl.load(score + sample, mask=number < count, other=0.0).to(tl.float64)
        distance = tl.where(number < count, value - average, 0.0)
        squares += distance * distance
    deviation = tl.sqrt(squares / tl.maximum(count - 1, 1).to(tl.float64))
    for number in range(most):
        sample = tl.load(order + begin + number, mask=number < count, other=0)
        tl.store(size + sample, count.to(tl.float64), mask=number < count)
        tl.store(mean + sample, average, mask=number < count)
        tl.store(std + sample, deviation, mask=number < count)


@triton.jit(do_not_specialize=["columns"])
def group_sums_kernel(x, order, offsets, found, columns, COLUMNS: tl.constexpr):
    """COLUMNS numbers of the sum of group program_id(0)."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for place in range(tl.load(offsets + group), tl.load(offsets + group + 1)):
        sample = tl.load(order + place)
        total += tl.load(x + sample * columns + column, mask=column < columns, other=0.0).to(tl.float64)
    tl.store(found + group * columns + column, total, mask=column < columns)


def group_moments(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    score = score.contiguous()
    order, offsets = _sorted(group)
    size, mean, std = (torch.empty_like(score, dtype=torch.float64) for _ in range(3))
    groups = len(offsets) - 1
    group_moments_kernel[(triton.cdiv(groups, GROUPS),)](
        score, order, offsets, size, mean, std, groups, GROUPS=GROUPS, num_warps=MOMENTS_WARPS
    )
    return size, mean, std


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    x = x.contiguous()
    order, offsets = _sorted(group)
    groups, columns = len(offsets) - 1, x[0].numel()
    found = x.new_empty(groups, *x.shape[1:], dtype=torch.float64)
    group_sums_kernel[(groups, triton.cdiv(columns, COLUMNS))](
        x, order, offsets, found, columns, COLUMNS=COLUMNS, num_warps=SUMS_WARPS
    )
    return found


def _sorted(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples by group, then by number; and where the groups begin, and the last ends. int64."""
    ends = torch.bincount(group).cumsum(0)
    return torch.argsort(group, stable=True), torch.cat([ends.new_zeros(1), ends])


WHITEN_TILE = 4096
WHITEN_WARPS = 8


@triton.jit(do_not_specialize=["count", "tiles"])
def masked_moments(x, mask, parts, count, tiles, TILE: tl.constexpr):
    """parts: (3, tiles), of tile i the weights, the sum, and the squares around the tile's mean."""
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    weight = tl.load(mask + place, mask=place < count, other=0)
    is_counted, weight = weight != 0, weight.to(tl.float64)
    value = tl.load(x + place, mask=is_counted & (place < count), other=0.0).to(tl.float64)
    weights, total = tl.sum(weight), tl.sum(weight * value)
    distance = tl.where(is_counted, value - total / tl.where(weights != 0.0, weights, 1.0), 0.0)
    tl.store(parts + tile, weights)
    tl.store(parts + tiles + tile, total)
    tl.store(parts + 2 * tiles + tile, tl.sum(weight * distance * distance))


@triton.jit(do_not_specialize=["count"])
def masked_scale(x, mean, scale, y, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float64)
    white = (value - tl.load(mean)) * tl.load(scale)
    tl.store(y + place, white.to(tl.float32).to(y.dtype.element_ty), mask=place < count)


class TritonWhitening:
    """Same as `TorchWhitening`, except for the computation of the squares."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self._x, mask = x.contiguous(), mask.contiguous()
        self._tiles = triton.cdiv(x.numel(), WHITEN_TILE)
        self._parts = x.new_empty(3, self._tiles, dtype=torch.float64)
        if self._tiles:
            masked_moments[(self._tiles,)](
                self._x, mask, self._parts, x.numel(), self._tiles, TILE=WHITEN_TILE, num_warps=WHITEN_WARPS
            )  # fmt: skip

    def sums(self) -> Tensor:
        return self._parts[:2].sum(1)

    def squares(self, mean: Tensor) -> Tensor:
        """Combine the tiles' squares around their own means with the distances of these means from `mean`."""
        self._mean = mean
        weights, total, squares = self._parts
        distance = total / torch.where(weights != 0, weights, 1.0) - mean
        return (squares + weights * distance.square()).sum().reshape(1)

    def result(self, scale: Tensor) -> Tensor:
        y = torch.empty_like(self._x)
        if self._tiles:
            masked_scale[(self._tiles,)](
                self._x, self._mean, scale, y, y.numel(), TILE=WHITEN_TILE, num_warps=WHITEN_WARPS
            )
        return y


SCAN_TILE = 512  # tokens; a constant, because results depend on it bitwise
SCAN_WINDOW = 32  # number of tile maps that are composed at once
SCAN_WARPS = 4
MAP = tl.constexpr(5)  # numbers of a map: V' = keep V + value, A' = decay A + slope V + sum


@triton.jit
def compose(keep, value, decay, slope, total, first_keep, first_value, first_decay, first_slope, first_total):
    """The map of the later tokens, then that of the earlier ones (`first`). keep is 0, or 1 with value 0."""
    return (
        first_keep * keep,
        tl.where(first_keep > 0, value, first_value),
        first_decay * decay,
        first_decay * slope + first_slope * keep,
        first_decay * total + first_slope * value + first_total,
    )


@triton.jit(do_not_specialize=["tiles"])
def scan_tile(
    rewards, values, mask, offsets, maps, found, gamma, decay, tiles,
    VALUES: tl.constexpr, WRITE_MAPS: tl.constexpr, READ_MAPS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Tile program_id(1) of sequence program_id(0). maps: (sequences, tiles, MAP). Lane 0 is the last token."""
    sequence, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    first = begin + tile.to(tl.int64) * TILE
    if first >= end:
        return
    lane = tl.arange(0, TILE)
    place = first + (TILE - 1 - lane)
    inside = place < end
    is_counted = inside & (tl.load(mask + place, mask=inside, other=0) != 0)
    reward = tl.load(rewards + place, mask=is_counted, other=0.0).to(tl.float32)
    value = tl.zeros((TILE,), tl.float32)
    if VALUES:
        value = tl.load(values + place, mask=is_counted, other=0.0).to(tl.float32)
    keep, factor = tl.where(is_counted, 0.0, 1.0), tl.where(is_counted, decay, 1.0)
    slope, total = tl.where(is_counted, gamma, 0.0), reward - value
    keep, value, factor, slope, total = tl.associative_scan((keep, value, factor, slope, total), 0, compose)
    own_map = maps + (sequence * tiles + tile) * MAP
    if WRITE_MAPS:
        whole, nowhere = lane == TILE - 1, tl.zeros((TILE,), tl.int32)
        tl.store(own_map + nowhere, keep, mask=whole)
        tl.store(own_map + 1 + nowhere, value, mask=whole)
        tl.store(own_map + 2 + nowhere, factor, mask=whole)
        tl.store(own_map + 3 + nowhere, slope, mask=whole)
        tl.store(own_map + 4 + nowhere, total, mask=whole)
    else:
        if READ_MAPS:
            last = ((end - begin - 1) // TILE).to(tl.int32)
            next_value, next_found = 0.0, 0.0
            for back in range(last // WINDOW - tile // WINDOW + 1):
                window = (last // WINDOW - back) * WINDOW
                other = window + (WINDOW - 1 - tl.arange(0, WINDOW))
                later = (other > tile) & (other <= last)
                other_map = maps + (sequence * tiles + other) * MAP
                keeps, new_value = (
                    tl.load(other_map, mask=later, other=1.0),
                    tl.load(other_map + 1, mask=later, other=0.0),
                )
                factors, slopes = (
                    tl.load(other_map + 2, mask=later, other=1.0),
                    tl.load(other_map + 3, mask=later, other=0.0),
                )
                sums = tl.load(other_map + 4, mask=later, other=0.0)
                keeps, new_value, factors, slopes, sums = tl.associative_scan(
                    (keeps, new_value, factors, slopes, sums), 0, compose
                )
                whole = other == window
                new_found = tl.where(whole, factors * next_found + slopes * next_value + sums, 0.0)
                next_value = tl.sum(tl.where(whole, keeps * next_value + new_value, 0.0))
                next_found = tl.sum(new_found)
            total += factor * next_found + slope * next_value
        tl.store(found + place, total.to(found.dtype.element_ty), mask=inside)


def scan(
    rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, decay: float, rows: Rows, dtype: torch.dtype
) -> Tensor:
    """Segmented scan: one program per tile of a sequence; tiles begin at the sequence's start.

    The effect of a token on (V_next, A_next) of the later tokens is an affine map, and composition of maps is
    associative. For sequences longer than a tile, a first launch writes the map of each tile, and a second composes
    those after its own.
    """
    rewards, mask = rewards.contiguous(), mask.contiguous()
    values = None if values is None else values.contiguous()
    found = torch.empty_like(rewards, dtype=dtype)
    sequences, tiles = len(rows.offsets) - 1, triton.cdiv(rows.longest, SCAN_TILE)
    if not sequences or not tiles:
        return found
    maps = rewards.new_empty(sequences * tiles * MAP.value if tiles > 1 else 0, dtype=torch.float32)
    for writes in (True, False) if tiles > 1 else (False,):
        scan_tile[(sequences, tiles)](
            rewards, rewards if values is None else values, mask, rows.offsets, maps, found, gamma, decay, tiles,
            VALUES=values is not None, WRITE_MAPS=writes, READ_MAPS=tiles > 1, TILE=SCAN_TILE, WINDOW=SCAN_WINDOW,
            num_warps=SCAN_WARPS,
        )  # fmt: skip
    return found
