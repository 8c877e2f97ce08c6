"""Segmented scans in Triton: a program has a tile of one sequence, of which tiles begin at the sequence's start.

What a token does to (V_next, A_next) of the tokens behind it is an affine map, and maps compose associatively. Where a
sequence is longer than a tile, a first launch writes the map of each tile, and a second composes those behind its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.interpreter import Specimen
from hpcrl.kernels.segmented_scan import Rows

TILE = 512  # tokens; always the same, for the bits follow from it
WINDOW = 32  # maps of tiles that are composed at once
NUM_WARPS = 4
MAP = tl.constexpr(5)  # numbers of a map: V' = keep V + value, A' = decay A + slope V + sum


@triton.jit
def composed(keep, value, decay, slope, total, first_keep, first_value, first_decay, first_slope, first_total):
    """The map of the tokens behind, then that of the ones before (`first`). keep is 1, and value 0, or keep is 0."""
    return (
        first_keep * keep,
        tl.where(first_keep > 0, value, first_value),
        first_decay * decay,
        first_decay * slope + first_slope * keep,
        first_decay * total + first_slope * value + first_total,
    )


@triton.jit(do_not_specialize=["tiles"])
def run(
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
    counts = inside & (tl.load(mask + place, mask=inside, other=0) != 0)
    reward = tl.load(rewards + place, mask=counts, other=0.0).to(tl.float32)
    value = tl.zeros((TILE,), tl.float32)
    if VALUES:
        value = tl.load(values + place, mask=counts, other=0.0).to(tl.float32)
    keep, factor = tl.where(counts, 0.0, 1.0), tl.where(counts, decay, 1.0)
    slope, total = tl.where(counts, gamma, 0.0), reward - value
    keep, value, factor, slope, total = tl.associative_scan((keep, value, factor, slope, total), 0, composed)
    mine = maps + (sequence * tiles + tile) * MAP
    if WRITE_MAPS:
        whole, nowhere = lane == TILE - 1, tl.zeros((TILE,), tl.int32)
        tl.store(mine + nowhere, keep, mask=whole)
        tl.store(mine + 1 + nowhere, value, mask=whole)
        tl.store(mine + 2 + nowhere, factor, mask=whole)
        tl.store(mine + 3 + nowhere, slope, mask=whole)
        tl.store(mine + 4 + nowhere, total, mask=whole)
    else:
        if READ_MAPS:
            last = ((end - begin - 1) // TILE).to(tl.int32)
            next_value, next_found = 0.0, 0.0
            for back in range(last // WINDOW - tile // WINDOW + 1):
                window = (last // WINDOW - back) * WINDOW
                other = window + (WINDOW - 1 - tl.arange(0, WINDOW))
                behind = (other > tile) & (other <= last)
                its = maps + (sequence * tiles + other) * MAP
                keeps, new_value = tl.load(its, mask=behind, other=1.0), tl.load(its + 1, mask=behind, other=0.0)
                factors, slopes = tl.load(its + 2, mask=behind, other=1.0), tl.load(its + 3, mask=behind, other=0.0)
                sums = tl.load(its + 4, mask=behind, other=0.0)
                keeps, new_value, factors, slopes, sums = tl.associative_scan(
                    (keeps, new_value, factors, slopes, sums), 0, composed
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
    rewards, mask = rewards.contiguous(), mask.contiguous()
    values = None if values is None else values.contiguous()
    found = torch.empty_like(rewards, dtype=dtype)
    sequences, tiles = len(rows.offsets) - 1, triton.cdiv(rows.longest, TILE)
    if not sequences or not tiles:
        return found
    maps = rewards.new_empty(sequences * tiles * MAP.value if tiles > 1 else 0, dtype=torch.float32)
    for writes in (True, False) if tiles > 1 else (False,):
        run[(sequences, tiles)](
            rewards, rewards if values is None else values, mask, rows.offsets, maps, found, gamma, decay, tiles,
            VALUES=values is not None, WRITE_MAPS=writes, READ_MAPS=tiles > 1, TILE=TILE, WINDOW=WINDOW,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return found


def specimens() -> list[Specimen]:
    pointers = dict.fromkeys(("rewards", "values", "maps", "found"), "*fp32") | {"mask": "*i64", "offsets": "*i64"}
    signature = pointers | {"gamma": "fp32", "decay": "fp32", "tiles": "i32"}
    return [
        Specimen(
            f"segmented_scan {name}",
            run,
            signature,
            {"VALUES": True, "WRITE_MAPS": writes, "READ_MAPS": reads, "TILE": TILE, "WINDOW": WINDOW},
            NUM_WARPS,
        )
        for name, writes, reads in (("one tile", False, False), ("maps", True, False), ("many tiles", False, True))
    ]
