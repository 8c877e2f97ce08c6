"""Attention of exact mode in training and in decode, beside the library's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from kernel_cases.case import Case
from torch.nn.functional import scaled_dot_product_attention

from hpcrl.model.exact import PAGE, Tiles, packed_attention, paged_attention, tile_tokens

SEQUENCES, LENGTH, ROWS, CONTEXT = 16, 1024, 256, 2048
GROUPS, PER_HEAD, WIDTH = 2, 6, 128


def cases() -> Iterator[Case]:
    tokens, heads = SEQUENCES * LENGTH, GROUPS * PER_HEAD
    query, key, value = (
        torch.randn(tokens, count, WIDTH, device="cuda", dtype=torch.bfloat16) for count in (heads, GROUPS, GROUPS)
    )
    padded = [part.unflatten(0, (SEQUENCES, -1)).transpose(1, 2) for part in (query, key, value)]
    runs = {
        "hpcrl": lambda: packed_attention(query, key, value, (LENGTH,) * SEQUENCES),
        "torch sdpa": lambda: scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True),
    }
    nbytes = 2 * query.nbytes + key.nbytes + value.nbytes
    yield Case(f"exact attention {SEQUENCES} x {LENGTH}", runs, nbytes, 2 * tokens * LENGTH * heads * WIDTH)
    yield _decode()


def _decode() -> Case:
    width = -(-CONTEXT // PAGE)
    table = np.random.default_rng(0).permutation(ROWS * width).reshape(ROWS, width)
    keys = torch.randn(ROWS * width, GROUPS, WIDTH, PAGE, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(ROWS * width, GROUPS, PAGE, WIDTH, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(ROWS, GROUPS, PER_HEAD, WIDTH, device="cuda", dtype=torch.bfloat16)
    cached, one = np.full(ROWS, CONTEXT - 1), np.ones(ROWS, np.int64)
    tiles = Tiles.of(one, cached, table, tile_tokens(PER_HEAD, keys.dtype), keys.device)
    runs = {"hpcrl": lambda: paged_attention(queries, keys, values, tiles)}
    flops = 4 * ROWS * CONTEXT * GROUPS * PER_HEAD * WIDTH
    return Case(f"exact attention of {ROWS} rows of {CONTEXT}", runs, keys.nbytes + values.nbytes, flops)
