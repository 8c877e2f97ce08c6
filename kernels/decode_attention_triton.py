"""Decode attention in Triton: one program per part of a row's tokens, KV head and group of queries; other programs
combine the parts of a row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels.chips import chip_of
from hpcrl.kernels.decode_attention import Cut, PagedRows, first_width, values_are_keys

MASKED = tl.constexpr(-1e30)  # finite, so that differences are not NaN
LOG2_E = math.log2(math.e)
SMALLEST_DOT = 16  # minimum rows and columns of a product
MOST_OUTPUTS = 16384  # maximum outputs of a program, in registers
TILE_BYTES = 36864  # of keys and values in one step, two of which are in flight
PARTS_AT_ONCE = 16
CUT_AT_ONCE = 1024  # minimum rows, because as many numbers of unused parts are cleared at once


@triton.jit
def attend(
    queries, keys, values, blocks, parts, totals, maxima, sums, scale,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    FIRST: tl.constexpr, FIRST_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_IN_KEY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of 2, over TILE tokens at a time.

    Keys are read as FIRST columns and the REST of them, each padded to a power of 2.
    """
    GROUPS: tl.constexpr = (PER_HEAD + QUERIES - 1) // QUERIES
    KEY: tl.constexpr = FIRST + REST
    program = tl.program_id(0)
    part, head = program // (HEADS * GROUPS), program // GROUPS % HEADS
    start, row = tl.load(parts + part * 4), tl.load(parts + part * 4 + 1)
    tokens = tl.load(parts + part * 4 + 2)
    if tokens > 0:
        query = program % GROUPS * QUERIES + tl.arange(0, QUERIES)
        real = (query < PER_HEAD)[:, None]
        of_first, of_rest, of_value = tl.arange(0, FIRST_BLOCK), tl.arange(0, REST_BLOCK), tl.arange(0, VALUE_BLOCK)
        place = tl.arange(0, TILE)
        offset = place % SIZE
        at = queries + ((row.to(tl.int64) * HEADS + head) * PER_HEAD + query[:, None]) * KEY
        first_query = tl.load(at + of_first[None, :], mask=real & (of_first < FIRST)[None, :], other=0.0)
        if REST > 0:
            rest_query = tl.load(at + FIRST + of_rest[None, :], mask=real & (of_rest < REST)[None, :], other=0.0)
        maximum = tl.full((QUERIES,), MASKED, tl.float32)
        total_weight = tl.zeros((QUERIES,), tl.float32)
        total = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
        num_blocks = tl.cdiv(tokens, SIZE)
        number = place // SIZE
        valid = number < num_blocks
        block = tl.load(blocks + start + number, mask=valid, other=0)
        for tile in tl.range(0, tl.cdiv(tokens, TILE), num_stages=STAGES):
            # A hint for the compiler: the tokens of a block are contiguous.
            item = tl.max_constancy(block.to(tl.int64) * HEADS + head, SIZE)
            keys_at = keys + tl.multiple_of(item * (KEY * SIZE), SIZE) + offset
            key = tl.load(
                keys_at[None, :] + of_first[:, None] * SIZE,
                mask=valid[None, :] & (of_first < FIRST)[:, None],
                other=0.0,
            )
            key = key.to(first_query.dtype)  # from 8 bits
            scores = tl.dot(first_query, key, input_precision="ieee")
            if REST > 0:
                inside = valid[None, :] & (of_rest < REST)[:, None]
                rest = tl.load(keys_at[None, :] + (FIRST + of_rest)[:, None] * SIZE, mask=inside, other=0.0)
                scores = tl.dot(rest_query, rest.to(rest_query.dtype), scores, input_precision="ieee")
            if VALUE_IN_KEY:
                value = tl.trans(key)
            else:
                values_at = values + item * (SIZE * VALUE) + offset * VALUE
                inside = valid[:, None] & (of_value < VALUE)[None, :]
                value = tl.load(values_at[:, None] + of_value[None, :], mask=inside, other=0.0).to(key.dtype)
            # Load the next tile's block numbers early, so that its loads need not wait for them.
            number += TILE // SIZE
            valid = number < num_blocks
            block = tl.load(blocks + start + number, mask=valid, other=0)
            scores = tl.where((tile * TILE + place < tokens)[None, :], scores * scale, MASKED)
            higher = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            factor = tl.exp2(maximum - higher)
            total_weight = total_weight * factor + tl.sum(weights, 1)
            total = tl.dot(weights.to(value.dtype), value, total * factor[:, None], input_precision="ieee")
            maximum = higher
        at_out = (part.to(tl.int64) * HEADS + head) * PER_HEAD + query
        tl.store(maxima + at_out, maximum, mask=query < PER_HEAD)
        tl.store(sums + at_out, total_weight, mask=query < PER_HEAD)
        tl.store(totals + at_out[:, None] * VALUE + of_value[None, :], total, mask=real & (of_value < VALUE)[None, :])


@triton.jit
def combine(
    totals, maxima, sums, parts_of, sinks, outputs,
    QUERIES: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr, OF_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row into the output of one of its QUERIES (of all KV heads)."""
    program = tl.program_id(0).to(tl.int64)
    row, query = program // QUERIES, program % QUERIES
    first, count = tl.load(parts_of + row * 2).to(tl.int64), tl.load(parts_of + row * 2 + 1)
    column, number = tl.arange(0, VALUE_BLOCK), tl.arange(0, AT_ONCE)
    maximum = tl.full((1,), MASKED, tl.float32)
    total_weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((VALUE_BLOCK,), tl.float32)
    for begin in range(0, count, AT_ONCE):
        valid = begin + number < count
        at_in = (first + begin + number) * QUERIES + query
        part_maxima = tl.load(maxima + at_in, mask=valid, other=MASKED)
        part_sums = tl.load(sums + at_in, mask=valid, other=0.0)
        inside = valid[:, None] & (column < VALUE)[None, :]
        part_totals = tl.load(totals + at_in[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
        higher = tl.maximum(maximum, tl.max(part_maxima, 0))
        factor, factors = tl.exp2(maximum - higher), tl.exp2(part_maxima - higher)
        total_weight = total_weight * factor + tl.sum(part_sums * factors, 0)
        total = total * factor + tl.sum(part_totals * factors[:, None], 0)
        maximum = higher
    if HAS_SINKS:
        sink = tl.load(sinks + query).to(tl.float32) * OF_SINKS
        higher = tl.maximum(maximum, sink)
        factor = tl.exp2(maximum - higher)
        total_weight = total_weight * factor + tl.exp2(sink - higher)
        total = total * factor
    tl.store(outputs + program * VALUE + column, (total / total_weight).to(outputs.dtype.element_ty), column < VALUE)


@triton.jit
def cut_kernel(
    starts, lengths, num_rows, parts, parts_of, n, num_parts, num_wanted, least, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`hpcrl.kernels.decode_attention.cut_rows`, by one program."""
    row = tl.arange(0, ROWS)
    inside = row < n
    real = row < tl.load(num_rows)
    start = tl.load(starts + row, mask=inside, other=0)
    length = tl.load(lengths + row, mask=inside & real, other=0)
    longest = tl.maximum(tl.cdiv(tl.sum(length, 0), num_wanted), least)
    unit = SIZE * tl.maximum(tl.cdiv(length, longest), 1)
    tokens = tl.cdiv(length, unit) * SIZE
    counts = tl.cdiv(length, tl.maximum(tokens, 1))
    firsts = tl.cumsum(counts, 0) - counts
    count_of_first_row = tl.sum(tl.where(row == 0, counts, 0), 0)
    tl.store(parts_of + row * 2, tl.where(real, firsts, 0), mask=inside)
    tl.store(parts_of + row * 2 + 1, tl.where(real, counts, count_of_first_row), mask=inside)
    for number in range(tl.max(counts, 0)):
        at, valid, begin = parts + (firsts + number) * 4, number < counts, number * tokens
        tl.store(at, start + begin // SIZE, mask=valid)
        tl.store(at + 1, row, mask=valid)
        tl.store(at + 2, tl.minimum(tokens, length - begin), mask=valid)
        tl.store(at + 3, tl.zeros_like(row), mask=valid)
    for first in range(tl.sum(counts, 0) * 4, num_parts * 4, ROWS):
        tl.store(parts + first + row, tl.zeros_like(row), mask=first + row < num_parts * 4)


class Launch(NamedTuple):
    constants: dict[str, Any]
    num_warps: int


def _padded(width: int) -> int:
    return max(SMALLEST_DOT, triton.next_power_of_2(width))


def attend_launch(
    groups: int, per_head: int, key: int, value: int, first: int, value_in_key: bool, size: int, itemsize: int,
    shared_bytes: int,
) -> Launch:  # fmt: skip
    block = _padded(value)
    queries = min(_padded(per_head), max(SMALLEST_DOT, MOST_OUTPUTS // block))
    token_bytes = (key if value_in_key else key + value) * itemsize
    tile = max(size, min(128, 1 << (max(TILE_BYTES // token_bytes, 1).bit_length() - 1)))
    constants = {
        "HEADS": groups, "PER_HEAD": per_head, "SIZE": size, "TILE": tile, "QUERIES": queries,
        "FIRST": first, "FIRST_BLOCK": _padded(first), "REST": key - first, "REST_BLOCK": _padded(key - first),
        "VALUE": value, "VALUE_BLOCK": block, "VALUE_IN_KEY": value_in_key,
        "STAGES": 3 if tile * token_bytes <= min(TILE_BYTES, shared_bytes // 2) else 2,  # others would not fit twice
    }  # fmt: skip
    return Launch(constants, 8 if queries * block * itemsize >= 8192 else 4)


def combine_launch(groups: int, per_head: int, value: int) -> Launch:
    sizes = {"QUERIES": groups * per_head, "VALUE": value, "VALUE_BLOCK": _padded(value), "AT_ONCE": PARTS_AT_ONCE}
    return Launch({**sizes, "OF_SINKS": LOG2_E}, 1 if value <= 128 else 4)


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, sinks: Tensor | None = None
) -> Tensor:
    n, groups, per_head, key = queries.shape
    value, parts = values.size(-1), len(rows.parts)
    first, value_in_key = first_width(keys, values), values_are_keys(keys, values)
    totals = queries.new_empty((parts, groups, per_head, value), dtype=torch.float32)
    maxima, sums = totals.new_empty((2, parts, groups, per_head))
    outputs = queries.new_empty((n, groups, per_head, value))
    itemsize, shared_bytes = keys.element_size(), chip_of(keys.device).shared_bytes
    launch = attend_launch(groups, per_head, key, value, first, value_in_key, keys.size(-1), itemsize, shared_bytes)
    tiles = triton.cdiv(per_head, launch.constants["QUERIES"])
    attend[(parts * groups * tiles,)](
        queries.contiguous(), keys, values, rows.blocks, rows.parts, totals, maxima, sums, scale * LOG2_E,
        **launch.constants, num_warps=launch.num_warps,
    )  # fmt: skip
    launch = combine_launch(groups, per_head, value)
    combine[(n * groups * per_head,)](
        totals, maxima, sums, rows.parts_of, sums if sinks is None else sinks.contiguous(), outputs,
        HAS_SINKS=sinks is not None, **launch.constants, num_warps=launch.num_warps,
    )  # fmt: skip
    return outputs


def cut_rows(starts: Tensor, lengths: Tensor, size: int, cut: Cut, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    n = len(lengths)
    parts, parts_of = lengths.new_empty((n + cut.wanted, 4)), lengths.new_empty((n, 2))
    rows = max(CUT_AT_ONCE, triton.next_power_of_2(n))
    cut_kernel[(1,)](starts, lengths, num_rows, parts, parts_of, n, len(parts), *cut, SIZE=size, ROWS=rows, num_warps=4)
    return parts, parts_of
